"""The local Prefect server's record, port and answers; flows/cli/test_run.py starts a real one."""

import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import psutil
import pytest

from infra.prefect import server as server_module
from infra.prefect.access import AUTH, ServerError
from infra.prefect.server import (
    Server,
    adopt_password,
    end_process,
    find_password,
    find_record,
    find_server,
    own_environment,
    password_path,
    shared_server,
    start_server,
    stop_server,
    use_server,
    wait_for_server,
    write_record,
)
from nanochat_core.runtime.process_start import this_process
from tests.support.infra.prefect_server import ensure_server
from tests.support.serving import QuietHandler, serving


@pytest.fixture(autouse=True)
def no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process uses the password of a server from when it starts it until the test's end."""
    monkeypatch.setenv(AUTH, "another-servers:password")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


def test_a_server_is_found_by_its_record_and_a_process_that_took_over_its_number_is_none(
    tmp_path: Path,
) -> None:
    me = this_process()
    write_record(tmp_path, Server(port=4242, pid=me.pid, start=me.start))
    server = find_server(tmp_path)
    assert server is not None
    assert server.api_url == "http://127.0.0.1:4242/api"

    write_record(tmp_path, replace(server, start="1"))
    assert find_server(tmp_path) is None
    assert stop_server(tmp_path) is False


def test_a_process_has_ended_although_its_parent_has_not_collected_it() -> None:
    child = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); "
    command = [sys.executable, "-c", child + "sys.stdin.read()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))

        end_process(process, 60)

        assert process.status() == psutil.STATUS_ZOMBIE
        parent.kill()


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of homes; servers that are started never open their port."""
    program = tmp_path / "silent"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    yield tmp_path
    for home in filter(Path.is_dir, tmp_path.iterdir()):
        stop_server(home)


def test_a_taken_or_chosen_port_is_left_out_and_the_address_stays_after_the_end(
    silent: Path,
) -> None:
    home = silent / "a"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        server = start_server(home, ports=range(port, port + 50))

        assert server.port > port
        # That server has not opened its port yet, as when both homes start at once.
        assert start_server(silent / "c", ports=range(port, port + 50)).port > server.port
        with pytest.raises(ServerError, match=f"none of the ports {port} to {port} is free"):
            start_server(silent / "b", ports=[port])
    assert stop_server(home)
    assert server.process is None
    assert find_record(home) == server  # the home keeps its address
    assert find_server(home) is None
    assert start_server(home, ports=[server.port]).port == server.port


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_variable_that_names_the_homes_own_server_names_no_shared_one(
    silent: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    home = silent / "home"
    server = start_server(home)
    monkeypatch.setenv("PREFECT_API_URL", f"http://{host}:{server.port}/api/")
    monkeypatch.setenv(AUTH, "another-servers:password")
    assert shared_server(home) is None
    adopt_password(home)
    assert os.environ[AUTH] == find_password(home)
    stop_server(home)
    assert shared_server(home) is None
    with socket.create_server(("127.0.0.1", server.port)):  # such as a server of the user's own
        assert shared_server(home) == f"http://{host}:{server.port}/api"
        monkeypatch.setenv(AUTH, "another-servers:password")
        adopt_password(home)
        assert os.environ[AUTH] == "another-servers:password"
    assert shared_server(silent / "another") == f"http://{host}:{server.port}/api"


def test_a_profile_of_the_users_own_prefect_is_no_setting_of_ours(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, PREFECT_PROFILE="mine"):  # which our home does not have
        assert "PREFECT_PROFILE" not in own_environment(is_shared=True)
        use_server(tmp_path, "http://127.0.0.1:1/api")
        assert "PREFECT_PROFILE" not in os.environ


def test_a_password_is_made_once_for_its_owner_alone(silent: Path) -> None:
    home = silent / "home"
    start_server(home)
    password = find_password(home)
    assert re.fullmatch(r"nanochat:[\w-]{32}", password or "")
    assert stat.S_IMODE(password_path(home).stat().st_mode) == 0o600
    stop_server(home)
    password_path(home).chmod(0o644)
    start_server(home)
    assert find_password(home) == password
    assert stat.S_IMODE(password_path(home).stat().st_mode) == 0o600


@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_server_without_a_password_is_had_by_asking_for_it(
    tmp_path: Path, silent: Path, is_adopted: bool
) -> None:
    home = tmp_path / "home"
    start_server(home)  # an earlier one has a password
    stop_server(home)
    if is_adopted:  # as `nanochat up` does first
        adopt_password(home)

    server = start_server(home, guarded=False)

    assert find_password(home) is None
    assert server.process is not None
    assert not [
        name for name in server.process.environ() if name.startswith("PREFECT") and "AUTH" in name
    ]
    stop_server(home)
    server = start_server(home)
    assert server.process is not None
    assert server.process.environ()["PREFECT_SERVER_API_AUTH_STRING"] == find_password(home)


def test_a_server_that_dies_while_starting_is_reported_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "prefect").mkdir()
    (tmp_path / "prefect" / "server.log").write_text("starting\nno such table: run\n\n")
    dead = Server(port=1, pid=os.getpid(), start="1")

    with pytest.raises(ServerError, match="ended while starting: no such table: run") as caught:
        wait_for_server(tmp_path, dead)

    assert "server.log" in (caught.value.hint or "")


class Healthy(QuietHandler):
    """Answers as a Prefect server's health check does."""

    def do_GET(self) -> None:
        self.reply(200, b"true")


def test_another_program_that_took_the_port_does_not_pass_for_the_server(silent: Path) -> None:
    server = start_server(silent / "home")
    with serving(Healthy) as port, pytest.raises(ServerError, match=f"answer on port {port} after"):
        wait_for_server(silent, replace(server, port=port), seconds=0.2)


def test_a_server_whose_record_cannot_be_written_is_ended(
    silent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(server_module, "write_record", fail)
    before = psutil.Process().children()
    with pytest.raises(ServerError, match="cannot be written: no space left"):
        start_server(silent / "home")
    assert psutil.Process().children() == before


def test_a_home_that_cannot_be_written_is_a_mistake_of_a_person(tmp_path: Path) -> None:
    (tmp_path / "prefect").write_text("a file where the directory should be")

    with pytest.raises(ServerError, match="cannot be written") as caught:
        ensure_server(tmp_path)

    assert "NANOCHAT_HOME" in (caught.value.hint or "")
