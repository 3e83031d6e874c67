"""`nanochat run` as a person meets it when the run cannot go on, and the server that it starts."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.cli.app import main
from infra.prefect.flow_runs import page_of
from infra.prefect.server import find_server, start_server, stop_server, wait_for_server

pytestmark = pytest.mark.prefect


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Iterator[Path]:
    """A home whose Prefect server has a history, and is stopped in the end."""
    directory = tmp_path_factory.mktemp("home")
    (directory / "prefect").mkdir()
    directory.chmod(0o755)  # as homes of earlier versions are
    shutil.copy(prefect_database, directory / "prefect" / "prefect.db")
    yield directory
    stop_server(directory)


@contextlib.contextmanager
def start_run(home: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A run in a process, which ends with the block."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT", "NANOCHAT"))}
    with subprocess.Popen(
        [sys.executable, "-m", "flows.cli.app", "run", "tiny", "--home", str(home), *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        try:
            yield run
        finally:
            run.kill()


def test_an_unreadable_shard_is_one_line_and_a_hint(home, tmp_path):
    shard = tmp_path / "a.parquet"
    shard.write_text("not parquet")
    with start_run(home, "--set", "shards.source=local", "--set", f"shards.path={tmp_path}") as run:
        out, err = run.communicate()

    assert run.returncode == 1
    error, hint = err.splitlines()
    assert error.startswith(f"error: shards: {shard} cannot be read as parquet")
    assert hint.startswith("hint: ")
    assert "Traceback" not in out + err


def test_ctrl_c_ends_a_run_with_the_command_that_resumes(home, capsys):
    pace = ("--gpus", "0", "--place", "save_every_steps=7")
    given = ("nanochat run tiny --set rl.num_steps=3 --home", str(home), *pace, "--name short")
    command = " ".join(given)
    # Without --force: the command finishes the rebuild, and would begin it anew with it.
    options = ("--set", "rl.num_steps=3", "--name", "short", "--force", "shards", *pace)
    with start_run(home, *options) as run:
        assert run.stdout is not None
        while not run.stdout.readline().startswith("shards "):
            assert run.poll() is None
        run.send_signal(signal.SIGINT)
        out, err = run.communicate()

    assert run.returncode == 130
    assert err.splitlines() == ["error: interrupted", f"hint: resume with: {command}"]
    assert "Traceback" not in out
    assert main(["status", "short", "--home", str(home)]) == 0
    assert f"  command  {command}\n" in capsys.readouterr().out


def test_the_server_starts_once_survives_its_starter_and_stops(home, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    server = start_server(home)  # it runs already, if a test above has run
    wait_for_server(home, server)
    assert start_server(home) == find_server(home) == server
    modes = [path.stat().st_mode & 0o777 for path in (home, home / "prefect")]
    assert modes == [0o700, 0o700]
    with urllib.request.urlopen(f"{server.ui_url}/ui-settings") as answer:
        assert json.load(answer)["api_url"] == server.api_url
    # The printed page of a run is one of the new pages, to which the address to log in leads.
    page = urllib.request.Request(page_of(server.ui_url, "x"), headers={"Accept": "text/html"})
    with urllib.request.urlopen(page) as answer:
        assert b'="/v2/' in answer.read()
    assert "Traceback" not in (home / "prefect" / "server.log").read_text()

    assert stop_server(home) is True
    assert find_server(home) is None
    assert server.process is None
