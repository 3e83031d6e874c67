"""What cannot work is found before a Prefect server is started."""

import errno
import os
from pathlib import Path

import pytest

PREFECT = Path("home") / "prefect"


@pytest.fixture
def closed_store(tmp_path: Path) -> str:
    """A store that can be read and refuses writes, also those of root."""
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / ".tmp").write_text("in the way")
    return (tmp_path / "closed").as_uri()


COMMANDS = [
    ("run", "tiny"),
    ("miniseries", "tiny", "--depths", "1,2"),
    ("sweep", "tiny", "--vary", "optimizer.muon_lr=0.1"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=str)
@pytest.mark.usefixtures("api_url")
def test_a_pool_that_the_server_does_not_know_is_refused(terminal, words, tmp_path):
    error, hint = terminal.fails(*words, "--pool", "nopool")
    assert error == (
        "no stage can be requested from the pool 'nopool': it has no deployment one-stage/nopool"
    )
    assert hint == "register it with: nanochat up --register --pool nopool"
    assert not (tmp_path / PREFECT).exists()


@pytest.mark.parametrize("words", COMMANDS, ids=str)
@pytest.mark.usefixtures("store")
def test_a_pool_without_any_server_has_no_workers(terminal, words, tmp_path, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    error, hint = terminal.fails(*words, "--pool", "gpu")
    assert error == "no Prefect server is running, and so no worker"
    assert hint == "start both with: nanochat up"
    assert not (tmp_path / PREFECT).exists()


@pytest.mark.parametrize("more", [(), ("--pool", "gpu")], ids=str)
@pytest.mark.parametrize("words", COMMANDS, ids=str)
@pytest.mark.usefixtures("api_url")
def test_a_store_that_refuses_writes_is_refused(terminal, words, more, closed_store, tmp_path):
    error, _ = terminal.fails(*words, "--store", closed_store, *more)
    assert error.startswith(f"store {closed_store} refuses: ")
    assert not (tmp_path / PREFECT).exists()


@pytest.mark.parametrize("words", COMMANDS[:2], ids=str)
def test_a_store_without_hard_links_is_refused(terminal, words, store, tmp_path, monkeypatch):
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    error, hint = terminal.fails(*words)
    assert error.startswith(f"store {store.url} refuses: operation not permitted")
    assert "hard links" in hint
    assert not list(store.list("names/"))
    assert not (tmp_path / PREFECT).exists()


@pytest.mark.parametrize("command", ["up --register", "up"])
@pytest.mark.usefixtures("store")
def test_a_name_that_no_pool_can_have_is_refused(terminal, command, tmp_path):
    for name in ("a b", "a/b", "a%", "x" * 101, ""):
        error, hint = terminal.fails(*command.split(), "--pool", name)
        assert error == f"{name!a} cannot be the name of a work pool"
        assert "gpu-a100" in hint
    error, _ = terminal.fails(*command.split(), "--pool", "none", "--pool", "cpu")
    assert error == "--pool none excludes other pools"
    assert not (tmp_path / PREFECT).exists()
