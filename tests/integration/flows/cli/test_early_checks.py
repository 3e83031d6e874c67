"""What cannot work is found before a Prefect server is started."""

import errno
import os

import pytest

COMMANDS = (
    "run tiny",
    "miniseries tiny --depths 1,2",
    "sweep tiny --vary optimizer.muon_lr=0.1",
)


@pytest.fixture
def refuses(terminal, tmp_path):
    """Compare the error of each of these commands, which starts no server, with the transcript."""

    def refuse(*commands, options=""):
        for command in commands:
            terminal.refuses(*command.split(), *options.split())
        assert not (tmp_path / "home" / "prefect").exists()

    return refuse


@pytest.mark.usefixtures("api_url")
def test_a_pool_that_the_server_does_not_know_is_refused(refuses):
    refuses(*COMMANDS, options="--pool nopool")


def test_a_pool_without_any_server_has_no_workers(refuses):
    refuses(*COMMANDS, options="--pool gpu")


@pytest.mark.usefixtures("api_url")
def test_a_store_that_refuses_writes_is_refused(refuses, tmp_path):
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / ".tmp").write_text("in the way")  # of root's writes too
    store = (tmp_path / "closed").as_uri()
    refuses(*COMMANDS, options=f"--store {store}")
    refuses(*COMMANDS, options=f"--store {store} --pool gpu")


def test_a_store_without_hard_links_is_refused(refuses, store, monkeypatch):
    def refuse(source, target):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    refuses(*COMMANDS[:2])
    assert not list(store.list("names/"))
