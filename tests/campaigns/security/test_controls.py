"""What the attacks must notice: a crash, an open server, an open home."""

import os
import re
import tempfile
import time
from pathlib import Path

import pytest

from infra.prefect.server import start_server, stop_server, wait_for_server
from tests.campaigns.security import model
from tests.support.infra.stack.attempts import (
    try_files_as_another_user,
    try_wrong_passwords,
)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.mark.prefect
def test_a_server_without_a_password_gets_through_the_attempts(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)
    (tmp_path / "prefect").mkdir()
    server = start_server(tmp_path, guarded=False)
    try:
        wait_for_server(tmp_path, server)
        outcome = try_wrong_passwords(server.api_url, {})
    finally:
        stop_server(tmp_path)
    assert any(n.startswith("/admin") and s == "status 200" for n, s in outcome.items())


@needs_root
def test_a_home_that_others_may_read_gets_through_the_attempts():
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        home.chmod(0o755)
        (home / "prefect").mkdir()
        for name in ("password", "prefect.db", "server.json"):
            (home / "prefect" / name).write_text("x")
        outcome = try_files_as_another_user(home)
    assert outcome["read prefect.db"] == "read"
    assert outcome[f"list {home.name}"] == "prefect"


@pytest.mark.torch
def test_a_crash_a_traceback_a_hang_and_a_wrong_answer_are_seen(tmp_path: Path) -> None:
    trials = (os.abort, lambda: time.sleep(60), lambda: [][0], lambda: None)

    def trial(directory: Path, rng: object) -> None:
        n = len(list(tmp_path.glob("seen-*")))
        (tmp_path / f"seen-{n}").touch()
        trials[n]()

    found = model.try_all(tmp_path, attempts=4, seed=1, trial=trial, seconds=5.0)
    assert [re.sub(".*: ", "", line) for line in found] == [
        "ended the process by SIGABRT",
        "ended the process by SIGALRM",
        "list index out of range",
    ]
