"""What a supervisor starts again, and what it reports of what cannot be started.

The server here is a small program that answers as Prefect's does when it is asked for its health.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.prefect import server as server_module
from infra.prefect.access import AUTH, ServerError
from infra.prefect.server import (
    Server,
    find_server,
    start_server,
    stop_server,
)
from infra.prefect.supervisor import supervisor as supervisor_module
from infra.prefect.supervisor.supervisor import Supervisor
from tests.support.infra.ports import quiet_port
from tests.support.infra.stack.live import wait_for

PYTHON = sys.executable  # which a fixture replaces below
ANSWERS = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404 if "csrf-token" in self.path else 200)
        self.end_headers()
        self.wfile.write(b"true")

    def log_message(self, *words):
        pass


HTTPServer(("127.0.0.1", int(sys.argv[-1])), Healthy).serve_forever()
"""
DIES = "print('PermissionError: no room\\nAn exception occurred.\\n'); raise SystemExit(1)"


@pytest.fixture(autouse=True)
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers are such programs; a supervisor polls often, and its workers end at once."""
    for name in (AUTH, "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    program = tmp_path / "answers.py"
    program.write_text(ANSWERS)
    shell = tmp_path / "python"
    shell.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    shell.chmod(0o755)
    monkeypatch.setattr(server_module.sys, "executable", str(shell))
    monkeypatch.setattr(supervisor_module, "SLOW_SECONDS", 0.1)
    command = [PYTHON, "-c", DIES]
    monkeypatch.setattr(supervisor_module, "worker_command", lambda pool: command)
    yield
    stop_server(tmp_path)


def supervise(
    home: Path, work: Callable[[], object] = lambda: None, *, register: str = ""
) -> list[str]:
    """Run a supervisor until `work`, which begins once it is up, has ended; return its lines."""
    said: list[str] = []

    def run() -> None:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    Supervisor(
        home,
        ports=[quiet_port()],
        pools=["gpu"],
        store=None,
        register=[PYTHON, "-c", register] if register else [],
        guarded=True,
        log=said.append,
    ).run(lambda api_url: threading.Thread(target=run, daemon=True).start())
    return said


def test_what_ends_is_started_again_and_what_keeps_it_from_starting_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Server] = []
    tries: Counter[str] = Counter()
    fails = threading.Event()

    def start(home: Path, **options: Any) -> Server:
        tries["server"] += 1
        if fails.is_set():
            raise ServerError("the disk is full", hint="make room")
        return start_server(home, **options)

    def start_worker(*command: object, **options: object) -> None:
        tries["worker"] += 1
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(supervisor_module, "start_server", start)
    monkeypatch.setattr(supervisor_module, "spawn", start_worker)

    def kill() -> None:
        fails.set()
        first = find_server(tmp_path)
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        tries.clear()
        wait_for(lambda: min(tries["server"], tries["worker"]) > 2, "three tries of both")
        fails.clear()
        wait_for(lambda: find_server(tmp_path) is not None, "another server")
        seen.extend([first, find_server(tmp_path) or first])

    said = supervise(tmp_path, kill)

    first, second = seen
    assert first.port == second.port
    assert first.pid != second.pid
    assert said.count("server: not started: the disk is full; hint: make room") == 1
    assert said.count("worker gpu: not started: [Errno 28] No space left on device") == 1
    assert f"server: ended; started again as process {second.pid}" in said
    assert find_server(tmp_path) is None
    assert not [pid for pid in (first.pid, second.pid) if psutil.pid_exists(pid)]  # no zombie


def test_a_worker_that_ends_is_started_again_and_its_last_line_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []
    spawn = supervisor_module.spawn

    def count(command: Sequence[str], *, log: Path, environment: dict[str, str]) -> Any:
        started.append(log)
        return spawn(command, log=log, environment=environment)

    monkeypatch.setattr(supervisor_module, "spawn", count)

    said = supervise(tmp_path, lambda: wait_for(lambda: len(started) > 3, "three ends"))

    line = f"worker gpu: ended (1): PermissionError: no room; its log is {started[0]}"
    assert said.count(line) == 1


@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_registration_that_fails_ends_up_with_the_last_line_of_its_log(
    tmp_path: Path, *, is_adopted: bool
) -> None:
    if is_adopted:  # a run has started the server, and uses it
        start_server(tmp_path, ports=[quiet_port()])

    with pytest.raises(ServerError) as caught:
        supervise(tmp_path, register=DIES)

    assert str(caught.value) == (
        "the deployments could not be registered: PermissionError: no room"
    )
    assert caught.value.hint == f"its log is {tmp_path / 'prefect' / 'register.log'}"
    assert (find_server(tmp_path) is not None) == is_adopted


def test_a_signal_ends_the_registration(tmp_path: Path) -> None:
    waits = "import time; time.sleep(600)"
    seen: list[psutil.Process] = []

    def find() -> bool:
        seen[:] = [each for each in psutil.Process().children() if waits in each.cmdline()]
        return bool(seen)

    def end() -> None:
        wait_for(find, "the registration")
        os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.suppress(psutil.TimeoutExpired):
            seen[0].wait(20)
            return
        seen[0].kill()
        seen.clear()  # it was not ended

    work = threading.Thread(target=end)
    work.start()
    supervise(tmp_path, register=waits)
    work.join()
    assert seen


@pytest.mark.parametrize(
    ("numbers", "ends_at_once"),
    [
        ((signal.SIGINT, signal.SIGINT), True),
        ((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), False),  # `nanochat down`, then the window
        ((signal.SIGTERM, signal.SIGTERM), False),
    ],
)
def test_only_a_second_ctrl_c_is_not_waited_for(
    numbers: tuple[signal.Signals, ...], tmp_path: Path, *, ends_at_once: bool
) -> None:
    code = (
        "import signal, sys\n"
        "from pathlib import Path\n"
        "from infra.prefect.supervisor.supervisor import Supervisor\n"
        "s = Supervisor(Path(sys.argv[1]), pools=[], store=None, register=[], guarded=True, "
        "log=print)\n"
        "with s._until_signalled():\n"
        "    for number in sys.argv[2:]:\n"
        "        signal.raise_signal(int(number))\n"
    )
    words = [str(int(number)) for number in numbers]
    done = subprocess.run([PYTHON, "-c", code, str(tmp_path), *words], timeout=60)
    assert done.returncode == (-signal.SIGINT if ends_at_once else 0)
