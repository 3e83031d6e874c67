"""`nanochat up` as a person meets it: a new home, and a password that its owner alone has."""

import os
import re
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from infra.prefect.server import password_path
from tests.support.infra.ports import quiet_port
from tests.support.infra.stack.attempts import (
    LIST,
    OWNER,
    PLANTED,
    READ,
    WRITE,
    as_another_user,
    csrf_token,
    running_stack,
    try_files_as_another_user,
    try_from_an_origin,
    try_without_a_token,
    try_wrong_passwords,
)
from tests.support.infra.stack.live import LiveStack

pytestmark = [pytest.mark.prefect, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def live(prefect_database: Path) -> Iterator[LiveStack]:
    """A stack that is up, asked for on a port that another program has."""
    port = quiet_port()
    with (
        socket.create_server(("127.0.0.1", port)),
        running_stack("--port", str(port), history=prefect_database) as stack,
    ):
        assert port < (httpx.URL(stack.api_url).port or 0) < port + 100
        stack.deploy_toy()
        yield stack


def test_up_given_again_says_where_the_pages_are_and_what_to_do_next(live: LiveStack) -> None:
    before = live.supervisor, live.server, live.workers, len(live.processes())
    port = str(httpx.URL(live.api_url).port)

    again = live.command("up")

    assert live.api_url.removesuffix("/api") in again
    assert "nanochat run tiny" in again
    live.command("up", "--port", port)
    refused = live.nanochat("up", "--port", "4799")
    assert refused.returncode == 1
    assert "up already" in refused.stderr
    assert "nanochat down" in refused.stderr
    assert (live.supervisor, live.server, live.workers, len(live.processes())) == before


def test_a_worker_needs_no_name_that_another_user_has_in_the_temporary_directory(
    live: LiveStack,
) -> None:
    taken = live.temporary / "runner_storage"

    assert taken.read_text() == "of another user"
    assert list(live.temporary.iterdir()) == [taken]
    for pool in ("cpu", "gpu"):
        directory = live.home / "prefect" / f"worker-{pool}.tmp"
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_stack_is_that_users_alone(live: LiveStack) -> None:
    assert {process.uids().real for process in live.processes()} == {OWNER}


def test_a_new_home_has_no_traceback_in_its_logs(live: LiveStack, prefect_database: Path) -> None:
    logs = {log.stem: log.read_text() for log in (live.home / "prefect").glob("*.log")}

    # SQLite may refuse one of two that write at once; the server says so at length, and repeats it.
    assert unexcused(logs.pop("server")) == []
    assert unexcused(prefect_database.with_suffix(".log").read_text()) == []
    assert set(logs) == {"register", "worker-cpu", "worker-gpu"}
    assert not [name for name, text in logs.items() if "Traceback" in text]


def unexcused(log: str) -> list[str]:
    """The tracebacks of a log but those that say themselves that SQLite was locked."""
    _, *each = re.split(r"^.*Traceback \(most recent call last\):$", log, flags=re.MULTILINE)
    locked = re.compile(
        r"^\W*(sqlite3\.OperationalError:|sqlalchemy\.exc\.OperationalError: "
        r"\(sqlite3\.OperationalError\)) database is locked",
        flags=re.MULTILINE,
    )
    return [text for text in each if not locked.search(text)]


def test_its_server_has_our_deployments_and_settings(live: LiveStack) -> None:
    names = {item["name"] for item in live.ask("/deployments/filter", {})}
    vacuum = live.ask("/admin/settings")["server"]["services"]["db_vacuum"]

    assert {"nanochat", "gpu", "main", "sweep"} <= names
    assert set(vacuum["enabled"]) == {"events", "flow_runs"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_gets_no_file_of_the_home(live: LiveStack) -> None:
    files = [live.home, live.home / "prefect", password_path(live.home)]

    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o700, 0o700, 0o600]
    assert try_files_as_another_user(live.home) == {}
    with tempfile.TemporaryDirectory() as shared:  # the control: where all may write
        Path(shared).chmod(0o777)
        assert as_another_user(WRITE, shared) == "written"
        assert as_another_user(LIST, shared) == PLANTED
        assert as_another_user(READ, "/etc/passwd") == "read"


def test_only_the_password_gets_in_and_a_change_needs_a_token_too(live: LiveStack) -> None:
    token = csrf_token(live.api_url, live.password)

    assert try_wrong_passwords(live.api_url, token) == {}
    assert try_without_a_token(live.api_url, live.password) == {}


def test_the_password_is_in_no_command_line_and_no_other_file(live: LiveStack) -> None:
    secret = live.password.partition(":")[2]
    words = [" ".join(process.cmdline()) for process in live.processes()]
    files = [path for path in (live.home / "prefect").rglob("*") if path.is_file()]

    assert len(words) >= 4  # supervisor, server, two workers
    assert not [line for line in words if secret in line]
    assert [path for path in files if secret.encode() in path.read_bytes()] == [
        password_path(live.home)
    ]


def test_only_a_terminal_gets_the_password(live: LiveStack) -> None:
    secret = live.password.partition(":")[2]
    local = ("--set", "shards.source=local", "--set", "shards.path=/absent")
    submit = ("run", "tiny", "--submit", *local)
    commands = (("up",), ("status",), ("doctor", "--json"), ("plan", "tiny", "--json"), submit)

    assert secret in live.show("up")
    redirected = {words: live.nanochat(*words) for words in commands}

    said = {words: done.stdout + done.stderr for words, done in redirected.items()}
    assert not [words for words, text in said.items() if secret in text]
    assert "`nanochat up` prints it if its output is a terminal" in said[("up",)]


def test_only_the_pages_own_origin_gets_answers(live: LiveStack) -> None:
    own = live.api_url.removesuffix("/api")

    assert len(try_from_an_origin(live.api_url, own, live.password)) == 3
    assert try_from_an_origin(live.api_url, "http://127.0.0.1:1", live.password) == {}


def test_a_run_of_a_deployment_works_with_the_password(live: LiveStack) -> None:
    run = live.start_toy("guarded")
    live.finish_toy("guarded")

    live.wait_for_state(run, "Completed")
    # Only the worker keeps its temporary files in the home.
    assert (live.home / "guarded.temporary").read_text() == str(live.temporary)
