"""`nanochat up` as a person meets it: a new home, and a password that its owner alone has."""

import os
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import flows
from infra.prefect.server import password_path
from tests.support.browser.chromium import NO_CHROMIUM, find_chromium
from tests.support.infra.ports import quiet_port
from tests.support.infra.stack.attempts import (
    OWNER,
    csrf_token,
    running_stack,
    try_api_as_another_user,
    try_files_as_another_user,
    try_from_a_foreign_origin,
    try_without_a_token,
    try_wrong_passwords,
)
from tests.support.infra.stack.live import LiveStack

pytestmark = [pytest.mark.prefect, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def live(prefect_database: Path) -> Iterator[LiveStack]:
    """A stack that is up, asked for on a port that another program has."""
    with socket.socket() as taken:
        port = quiet_port()  # the stack takes one that follows
        taken.bind(("127.0.0.1", port))
        with running_stack("--port", str(port), history=prefect_database) as stack:
            stack.taken_port = port
            stack.deploy_toy()
            yield stack


def through(outcome: dict[str, str]) -> dict[str, str]:
    """Return the attempts that got something."""
    return {name: what for name, what in outcome.items() if what}


def test_up_says_where_the_pages_are_and_what_to_do_next(live: LiveStack) -> None:
    before = live.supervisor, live.server, live.workers, len(live.processes())

    again = live.nanochat("up")

    assert again.returncode == 0, again.stderr
    assert live.api_url.removesuffix("/api") in again.stdout
    assert "nanochat run tiny" in again.stdout
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


def test_a_taken_port_is_left_out(live: LiveStack) -> None:
    port = httpx.URL(live.api_url).port
    assert port is not None

    assert live.taken_port < port < live.taken_port + 100


def test_up_does_not_pretend_to_be_on_another_port(live: LiveStack) -> None:
    done = live.nanochat("up", "--port", "4799")

    assert done.returncode == 1
    assert "up already" in done.stderr
    assert "nanochat down" in done.stderr


def test_up_given_again_for_its_own_port_says_where_it_is(live: LiveStack) -> None:
    done = live.nanochat("up", "--port", str(httpx.URL(live.api_url).port))

    assert (done.returncode, done.stderr) == (0, "")


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


def test_old_runs_and_events_are_dropped_from_the_history(live: LiveStack) -> None:
    vacuum = live.ask("/admin/settings")["server"]["services"]["db_vacuum"]

    assert set(vacuum["enabled"]) == {"events", "flow_runs"}


def test_all_deployments_are_registered(live: LiveStack) -> None:
    names = {item["name"] for item in live.ask("/deployments/filter", {})}

    assert {"nanochat", "gpu", "main", "sweep"} <= names


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_gets_neither_the_password_nor_in(live: LiveStack) -> None:
    files = [live.home, live.home / "prefect", password_path(live.home)]

    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o700, 0o700, 0o600]
    assert through(try_files_as_another_user(live.home)) == {}
    assert through(try_api_as_another_user(live.api_url)) == {}


def test_only_the_password_gets_in(live: LiveStack) -> None:
    api_url = live.api_url
    token = csrf_token(api_url, live.password)

    assert through(try_wrong_passwords(api_url, token)) == {}
    assert live.ask("/admin/version")


def test_a_change_needs_a_token_besides_the_password(live: LiveStack) -> None:
    password = live.password

    assert through(try_without_a_token(live.api_url, password)) == {}


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
    submit = (
        "run",
        "tiny",
        "--submit",
        "--set",
        "shards.source=local",
        "--set",
        "shards.path=/absent",
    )
    commands = (("up",), ("status",), ("doctor", "--json"), ("plan", "tiny", "--json"), submit)

    assert secret in live.show("up")
    redirected = {words: live.nanochat(*words) for words in commands}

    said = {words: done.stdout + done.stderr for words, done in redirected.items()}
    assert not [words for words, text in said.items() if secret in text]
    assert "`nanochat up` prints it if its output is a terminal" in said[("up",)]


def test_the_password_has_one_printer() -> None:
    code = Path(flows.__file__).parent

    users = [path for path in code.rglob("*.py") if "find_password" in path.read_text()]

    assert users == [code / "cli" / "output.py"]


def test_the_printed_password_logs_in_and_a_foreign_origin_gets_nothing(live: LiveStack) -> None:
    if find_chromium() is None:
        pytest.skip(NO_CHROMIUM)

    assert through(try_from_a_foreign_origin(live)) == {}


def test_a_run_of_a_deployment_works_with_the_password(live: LiveStack) -> None:
    run = live.start_toy("guarded")
    live.finish_toy("guarded")

    live.wait_for_state(run, "Completed")
    # Only the worker keeps its temporary files in the home.
    assert (live.home / "guarded.temporary").read_text() == str(live.temporary)
