"""The server of a stack: one that hangs is killed, one that cannot start is waited for.

The server here is a small program that answers as Prefect's does when it is asked for its health.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra.prefect.access import AUTH, ServerError, answers
from infra.prefect.records import Server, find_process_of_server, write_record
from infra.prefect.supervisor import processes
from infra.prefect.supervisor import servers as servers_module
from infra.prefect.supervisor import supervisor as supervisor_module
from infra.prefect.supervisor.processes import ManagedProcess
from infra.prefect.supervisor.servers import MAX_UNANSWERED, OwnServer
from infra.prefect.supervisor.supervisor import Supervisor
from infra.prefect.supervisor.workers import managed_worker
from nanochat_core.runtime.process_start import start_of
from tests.support.infra.stack.live import wait_for

ANSWERS = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404 if "csrf-token" in self.path else 200)
        self.end_headers()
        self.wfile.write(b"true")

    def log_message(self, *words):
        pass


server = HTTPServer(("127.0.0.1", 0), Healthy)
Path(sys.argv[1]).write_text(str(server.server_port))
server.serve_forever()
"""


class Servers:
    """Starts such programs in place of Prefect's server."""

    def __init__(self, home: Path) -> None:
        self.problem: str | None = None
        self.started: list[subprocess.Popen[bytes]] = []
        self.said: list[str] = []
        self._home = home
        (home / "prefect").mkdir()

    def start(self, home: Path, *, port: int, guarded: bool) -> Server:
        if (running := find_process_of_server(home)) is not None:
            return running
        if self.problem is not None:
            raise ServerError(self.problem)
        told = home / f"port-{len(self.started)}"
        self.started.append(subprocess.Popen([sys.executable, "-c", ANSWERS, str(told)]))
        wait_for(lambda: told.exists() and told.read_text() != "", "a port")
        pid = self.started[-1].pid
        server = Server(port=int(told.read_text()), pid=pid, start=start_of(pid) or "")
        write_record(home, server)
        return server

    def supervise(self) -> OwnServer:
        """The one that looks after them, once it has found the first one up."""
        own = OwnServer(self._home, 4200, guarded=True, log=self.said.append)
        own.start()
        wait_for(lambda: own.poll() is not None, "the server")
        return own


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    for name in (AUTH, "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    found = Servers(tmp_path)
    monkeypatch.setattr(servers_module, "start_server", found.start)
    monkeypatch.setattr(servers_module, "SECONDS_BETWEEN_QUESTIONS", 0.0)
    monkeypatch.setattr("infra.prefect.access.ANSWER_SECONDS", 0.5)
    yield found
    for process in found.started:
        process.kill()
        process.wait()


def test_a_server_that_runs_and_answers_no_request_is_replaced(servers: Servers) -> None:
    own = servers.supervise()

    servers.started[0].send_signal(signal.SIGSTOP)

    wait_for(lambda: own.poll() is None, "the end of the hung one")
    assert servers.started[0].wait(120) == -signal.SIGKILL
    wait_for(lambda: own.poll() is not None, "another one")
    assert len(servers.started) == 2
    assert [line for line in servers.said if "left 12 questions unanswered; it is killed" in line]


def test_a_server_that_stands_still_for_a_moment_is_left_alone(servers: Servers) -> None:
    own = servers.supervise()
    for _ in range(2):
        servers.started[0].send_signal(signal.SIGSTOP)
        for _ in range(MAX_UNANSWERED - 2):
            assert own.poll() is not None  # its clients ask again
        servers.started[0].send_signal(signal.SIGCONT)
        assert answers(str(own.poll()))
        assert own.poll() is not None

    assert len(servers.started) == 1
    assert servers.started[0].poll() is None


def test_what_keeps_a_server_from_starting_again_is_waited_for(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = servers.supervise()
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr(processes, "time", clock)
    servers.problem = "the disk is full"
    servers.started[0].kill()
    servers.started[0].wait()

    for _ in range(20):
        now[0] += 31
        assert own.poll() is None
    assert servers.said[-1] == "server: the disk is full; again in 60 s"

    servers.problem = None
    now[0] += 61
    assert own.poll() is None  # it was started now
    wait_for(lambda: own.poll() is not None, "another one")


def test_what_keeps_a_server_from_starting_at_all_is_reported(
    servers: Servers, tmp_path: Path
) -> None:
    servers.problem = "the disk is full"

    with pytest.raises(ServerError, match="the disk is full"):
        OwnServer(tmp_path, 4200, guarded=True, log=servers.said.append).start()


def test_a_worker_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prefect").mkdir()
    said: list[str] = []
    worker = managed_worker("gpu", tmp_path, log=said.append)

    def fail(*command: object, **options: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(processes, "spawn", fail)

    worker.start({})

    assert (worker.pid, worker.may_start) == (None, False)
    assert said == ["worker gpu: No space left on device; again in 5 s"]


@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_worker_that_never_starts_is_given_up_with_the_last_line_of_its_log(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_adopted: bool
) -> None:
    monkeypatch.setattr("infra.retry.FIRST_PAUSE", 0.01)
    monkeypatch.setattr(supervisor_module, "ASK_SECONDS", 0.01)
    said = "print('PermissionError: no room\\nAn exception occurred.\\n'); raise SystemExit(1)"
    monkeypatch.setattr(
        supervisor_module,
        "managed_worker",
        lambda pool, home, *, log: ManagedProcess(
            pool, [sys.executable, "-c", said], output=home / "prefect" / "worker", log=log
        ),
    )
    if is_adopted:  # a run has started it, and uses it
        servers.start(tmp_path, port=4200, guarded=True)
    supervisor = Supervisor(
        tmp_path,
        port=4200,
        pools=["gpu"],
        store=None,
        register=[],
        guarded=True,
        log=servers.said.append,
    )

    with pytest.raises(ServerError) as caught:
        supervisor.run(lambda api_url: None)

    assert str(caught.value) == (
        "the worker of gpu ended 5 times while starting: PermissionError: no room"
    )
    assert caught.value.hint == f"its log is {tmp_path / 'prefect' / 'worker'}"
    assert (find_process_of_server(tmp_path) is not None) == is_adopted


@pytest.mark.parametrize(
    ("numbers", "hurries"),
    [
        ((signal.SIGINT, signal.SIGINT), True),
        ((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), False),  # `nanochat down`, then the window
        ((signal.SIGTERM, signal.SIGTERM), False),
    ],
)
def test_only_a_second_ctrl_c_ends_runs_before_they_have_saved(
    numbers: tuple[signal.Signals, ...], servers: Servers, tmp_path: Path, *, hurries: bool
) -> None:
    supervisor = Supervisor(
        tmp_path, port=4200, pools=[], store=None, register=[], guarded=True, log=print
    )
    with supervisor._until_signalled():  # pyright: ignore[reportPrivateUsage]
        for number in numbers:
            signal.raise_signal(number)
    assert supervisor._hurry.is_set() == hurries  # pyright: ignore[reportPrivateUsage]
