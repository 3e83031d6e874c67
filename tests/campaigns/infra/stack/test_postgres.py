"""A stack whose history is kept in Postgres."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.infra.stack.live import LiveStack, wait_for
from tests.support.infra.stack.postgres import PASSWORD, Postgres, running_postgres

pytestmark = [pytest.mark.prefect, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


def test_a_mistaken_database_is_one_line_and_starts_nothing(
    tmp_path: Path, postgres: Postgres
) -> None:
    stack = LiveStack(tmp_path / "home")
    mistaken = (
        (postgres.prefect_url.replace(PASSWORD, "wrong"), "password authentication failed"),
        (
            postgres.prefect_url.replace("/postgres", "/elsewhere"),
            'database "elsewhere" does not exist',
        ),
        (postgres.prefect_url.replace(str(postgres.port), "1"), "connection refused"),
    )

    for url, said in mistaken:
        done = stack.up(PREFECT_SERVER_DATABASE_CONNECTION_URL=url)
        error, hint = done.stderr.splitlines()
        assert done.returncode == 1
        assert said in error.lower()
        assert hint.startswith("hint: ")
        assert "wrong" not in done.stderr + done.stdout
        assert PASSWORD not in done.stderr + done.stdout
    assert stack.processes() == []


def test_a_stack_keeps_its_history_in_postgres(tmp_path: Path, postgres: Postgres) -> None:
    stack = LiveStack(tmp_path / "home")
    try:
        done = stack.up(PREFECT_SERVER_DATABASE_CONNECTION_URL=postgres.prefect_url)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        stack.deploy_toy()
        run = stack.start_toy("kept")
        _kill_server(stack)  # the supervisor still knows the database, and its password
        stack.finish_toy("kept")
        stack.wait_for_state(run, "Completed")

        assert postgres.select(f"select state_name from flow_run where id = '{run}'") == "Completed"
        assert not (stack.home / "prefect" / "prefect.db").exists()
        words = [" ".join(process.cmdline()) for process in stack.processes()]
        files = [path for path in (stack.home / "prefect").rglob("*") if path.is_file()]
        assert len(words) >= 4
        assert not [line for line in words if PASSWORD in line]
        assert not [path for path in files if PASSWORD.encode() in path.read_bytes()]
        for pid in filter(None, stack.workers):  # only the server needs it
            assert PASSWORD not in str(psutil.Process(pid).environ())
        assert "Traceback" not in (stack.home / "prefect" / "server.log").read_text()
    finally:
        stack.down()
    assert stack.processes() == []


def _kill_server(stack: LiveStack) -> None:
    before = stack.server
    assert before is not None
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: stack.server not in (None, before), "another server")
