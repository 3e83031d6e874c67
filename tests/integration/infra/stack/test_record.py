"""Locks, pauses and processes of a stack, without one."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from infra.prefect.access import AUTH
from infra.prefect.logs import MAX_BYTES, last_line, rotate
from infra.prefect.records import find_supervisor, supervisor_lock
from infra.prefect.server import stop_stack, wait_for_own_server
from infra.prefect.supervisor import processes
from infra.prefect.supervisor.processes import Backoff, ManagedProcess, end_workers
from infra.prefect.supervisor.supervisor import supervising
from infra.prefect.supervisor.workers import (
    runs_at_once,
    worker_command,
    worker_environment,
)
from nanochat_core.runtime.process_start import this_process
from tests.support.infra.stack.live import wait_for

# A worker with one run, which leads a session as Prefect's runs do. {} is what the run does at
# SIGTERM. The worker itself must not get SIGTERM before the run has ended.
WORKER = """
import os, signal, subprocess, sys, time
from pathlib import Path

run = '''
import signal, sys, time
from pathlib import Path

signal.signal(signal.SIGTERM, {})
Path("up").touch()
time.sleep(600)
'''
child = subprocess.Popen([sys.executable, "-c", run], start_new_session=True)
signal.signal(
    signal.SIGTERM,
    lambda *_: (Path("last").write_text(str(child.wait())), os._exit(0)),
)
Path("run").write_text(str(child.pid))
time.sleep(600)
"""
SAVES = "lambda *_: sys.exit(Path('saved').touch())"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (AUTH, "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_supervises_a_home_and_is_named_while_it_does(tmp_path: Path) -> None:
    assert find_supervisor(tmp_path) is None

    with supervising(tmp_path) as is_first, supervising(tmp_path) as is_second:
        found = find_supervisor(tmp_path)
        assert (is_first, is_second) == (True, False)
        assert found is not None
        assert found.pid == os.getpid()

    assert find_supervisor(tmp_path) is None
    with supervising(tmp_path) as is_ours:
        assert is_ours


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 9}', '{"format": 1, "pid": 1}'])
def test_a_lock_that_names_no_process_is_no_supervisor(tmp_path: Path, text: str) -> None:
    supervisor_lock(tmp_path).parent.mkdir()
    supervisor_lock(tmp_path).write_text(text)

    assert find_supervisor(tmp_path) is None


def test_a_process_that_has_the_number_of_a_supervisor_is_none(tmp_path: Path) -> None:
    supervisor_lock(tmp_path).parent.mkdir()
    with supervisor_lock(tmp_path).open("a") as file:
        replace(this_process(), start="1").write(file)

    assert find_supervisor(tmp_path) is None


def test_without_a_supervisor_or_a_server_of_it_there_is_no_wait(tmp_path: Path) -> None:
    wait_for_own_server(tmp_path)
    with supervising(tmp_path):  # of a shared server, perhaps
        wait_for_own_server(tmp_path)


def test_pauses_double_up_to_a_bound_and_start_again_after_a_long_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    pause = Backoff()
    waits: list[float] = []
    for _ in range(7):
        pause.began()
        waits.append(pause.ended())
    assert waits == [5, 10, 20, 40, 60, 60, 60]
    assert not pause.is_over
    assert pause.tries == 7

    pause.began()
    now[0] += 61

    assert pause.ended() == 5
    assert pause.tries == 1


def test_the_end_of_a_process_is_reported_once_with_its_code(tmp_path: Path) -> None:
    code = "print('last'); raise SystemExit(3)"
    child = ManagedProcess("x", [sys.executable, "-c", code], output=tmp_path / "x", log=print)

    child.start(dict(os.environ))

    wait_for(lambda: child.is_over, "its end")
    assert child.pid is not None  # not reported yet
    assert [child.ended(), child.ended(), child.pid] == [3, None, None]
    assert last_line(child.output) == "last"


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a worker whose run does this at SIGTERM; wait until both are up."""
    started: list[subprocess.Popen[bytes]] = []

    def start(at_sigterm: str, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", WORKER.replace("{}", at_sigterm), *words]
        started.append(subprocess.Popen(command, cwd=tmp_path, start_new_session=True))
        wait_for(lambda: (tmp_path / "up").exists() and (tmp_path / "run").exists(), "the run")
        return started[-1]

    yield start
    for worker in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((tmp_path / "run").read_text()), signal.SIGKILL)
        worker.kill()
        worker.wait()


def test_a_run_saves_before_its_worker_is_asked_to_end(
    tmp_path: Path, start_worker: Callable[..., subprocess.Popen[bytes]]
) -> None:
    worker = start_worker(SAVES)

    end_workers([psutil.Process(worker.pid)])

    assert (tmp_path / "saved").exists()
    assert (tmp_path / "last").read_text() == "0"
    assert worker.wait() == 0


@pytest.mark.parametrize("is_urgent", [True, False])
def test_a_run_that_ignores_the_request_is_killed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start_worker: Callable[..., subprocess.Popen[bytes]],
    *,
    is_urgent: bool,
) -> None:
    monkeypatch.setattr(processes, "SECONDS_TO_SAVE", 600.0 if is_urgent else 0.1)
    worker = start_worker("signal.SIG_IGN")
    run = psutil.Process(int((tmp_path / "run").read_text()))

    end_workers([psutil.Process(worker.pid)], is_urgent=lambda: is_urgent)

    wait_for(lambda: not run.is_running(), "the end of the run")
    last = tmp_path / "last"  # empty if the worker was killed while it wrote it
    assert not last.exists() or last.read_text() in ("", "-9")
    worker.wait(120)


def test_a_worker_ends_with_its_supervisor(tmp_path: Path) -> None:
    """The program that becomes a worker is killed by the kernel when its parent is killed."""
    (tmp_path / "prefect.py").write_text(  # what `python -m prefect` finds there
        "import os, sys, time\n"
        "from pathlib import Path\n"
        'told = f\'{os.getpid()} {" ".join(sys.argv[1:])} {"NANOCHAT_LAUNCHER" in os.environ}\'\n'
        "Path('new').write_text(told)\n"
        "Path('new').rename('up')\n"
        "time.sleep(600)\n"
    )
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from infra.prefect.supervisor.processes import ManagedProcess\n"
        "from infra.prefect.supervisor.workers import worker_command, worker_environment\n"
        "home = Path.cwd()\n"
        "output = home / 'gpu.log'\n"
        "child = ManagedProcess('gpu', worker_command('gpu'), output=output, log=print)\n"
        "child.start(worker_environment(home, 'http://127.0.0.1:1/api'))\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) as supervisor:
        wait_for((tmp_path / "up").exists, "the worker")
        pid, *words = (tmp_path / "up").read_text().split()
        worker = psutil.Process(int(pid))
        assert words[:4] == ["worker", "start", "--pool", "gpu"]
        assert words[-1] == "False"  # runs that it starts have another launcher
        supervisor.kill()

    wait_for(lambda: not worker.is_running(), "the end of the worker")


def test_a_long_log_is_begun_anew_while_a_process_writes_it(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with log.open("ab", buffering=0) as file:
        file.write(b"early\n")
        rotate(log)
        assert log.read_text() == "early\n"
        os.truncate(log, MAX_BYTES)
        file.write(b"\nlast of the old\n")

        rotate(log)
        file.write(b"new\n")

    assert log.read_text() == "new\n"
    assert last_line(tmp_path / "server.log.1") == "last of the old"


def test_down_in_a_fresh_home_finds_nothing(tmp_path: Path) -> None:
    assert not stop_stack(tmp_path)


def test_a_gpu_is_for_one_run_and_planning_is_for_several() -> None:
    assert runs_at_once("gpu") == runs_at_once("h100x8") == 1
    assert runs_at_once("cpu") > 4  # four series would wait for their own runs


def test_workers_know_their_home_and_never_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", "postgresql://me:hidden@db/x")
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "user:hidden")
    monkeypatch.setenv("PREFECT_API_KEY", "of somebody else's server")

    environment = worker_environment(tmp_path, "http://127.0.0.1:1/api")

    assert environment["NANOCHAT_HOME"] == str(tmp_path)
    assert environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
    assert "PREFECT_API_KEY" not in environment
    assert not [value for value in environment.values() if "hidden" in value]
    assert "http" not in " ".join(worker_command("gpu"))
