"""Locks, logs and processes of a stack, without one."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from infra.prefect import logs
from infra.prefect import server as server_module
from infra.prefect.access import AUTH, ServerError
from infra.prefect.logs import last_line, spawn
from infra.prefect.server import (
    Server,
    find_supervisor,
    start_server,
    stop_stack,
    supervisor_lock,
    write_record,
)
from infra.prefect.supervisor import supervisor as supervisor_module
from infra.prefect.supervisor.supervisor import end_workers, supervising
from infra.prefect.supervisor.workers import worker_command, worker_environment
from nanochat_core.runtime.process_start import this_process
from tests.support.infra.stack.live import wait_for

# A worker with one run, which leads a session as Prefect's runs do. {} is what the run does at
# SIGTERM. The worker itself would kill it before it has saved.
WORKER = """
import os, signal, subprocess, sys, time
from pathlib import Path

run = '''
import os, signal, sys, time
from pathlib import Path
from infra.prefect.supervisor.workers import end_with_worker

signal.signal(signal.SIGTERM, {})
end_with_worker()
Path("up").touch()
time.sleep(600)
'''
os.environ["PREFECT__FLOW_RUN_ID"] = "of a run"
child = subprocess.Popen([sys.executable, "-c", run], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: (child.kill(), os._exit(0)))
Path("run").write_text(str(child.pid))
time.sleep(600)
"""
# A run that imports until its worker has died.
LATE = """
import os, signal, sys, time
from pathlib import Path
from infra.prefect.supervisor.workers import end_with_worker

while not Path("go").exists():
    time.sleep(0.05)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(Path("saved").touch()))
end_with_worker()
Path("late").touch()
"""
SAVES = "lambda *_: sys.exit(Path('saved').touch())"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (AUTH, "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_supervises_a_home_and_is_named(tmp_path: Path) -> None:
    assert find_supervisor(tmp_path) is None

    with supervising(tmp_path) as is_first, supervising(tmp_path) as is_second:
        found = find_supervisor(tmp_path)
        assert (is_first, is_second) == (True, False)
        assert found is not None
        assert found.pid == os.getpid()

    with supervising(tmp_path) as is_ours:
        assert is_ours


ANOTHER = '{"format": 1, "pid": OURS, "start": "1"}'  # it only has our number


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 9}', '{"format": 1, "pid": 1}', ANOTHER]
)
def test_a_lock_that_names_no_live_process_is_no_supervisor(tmp_path: Path, text: str) -> None:
    supervisor_lock(tmp_path).parent.mkdir()
    supervisor_lock(tmp_path).write_text(text.replace("OURS", str(os.getpid())))

    assert find_supervisor(tmp_path) is None


def test_a_server_that_the_supervisor_restarts_is_not_started_by_another_process(
    tmp_path: Path,
) -> None:
    me = this_process()
    write_record(tmp_path, Server(port=1, pid=me.pid, start="another"))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        with supervisor_lock(tmp_path).open("a") as file:
            start = server_module.start_of(other.pid)
            assert start is not None
            replace(me, pid=other.pid, start=start).write(file)

        with pytest.raises(ServerError, match=f"process {other.pid}, `nanochat up`, supervises"):
            start_server(tmp_path)
        other.kill()


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


def test_a_run_saves_when_its_worker_is_ended(
    tmp_path: Path, start_worker: Callable[..., subprocess.Popen[bytes]]
) -> None:
    worker = start_worker(SAVES)
    run = psutil.Process(int((tmp_path / "run").read_text()))

    end_workers([worker])

    assert (tmp_path / "saved").exists()
    assert worker.returncode == -signal.SIGKILL
    assert not run.is_running() or run.status() == psutil.STATUS_ZOMBIE


def test_a_worker_that_has_just_ended_keeps_no_other_from_being_ended() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    wait_for(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE, "its end")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as living:
        end_workers([ended, living])

        assert living.returncode == -signal.SIGKILL


def test_a_run_that_ignores_the_request_is_killed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start_worker: Callable[..., subprocess.Popen[bytes]],
) -> None:
    monkeypatch.setattr(supervisor_module, "SECONDS_TO_SAVE", 0.1)
    worker = start_worker("signal.SIG_IGN")
    run = psutil.Process(int((tmp_path / "run").read_text()))

    end_workers([worker])

    wait_for(
        lambda: not run.is_running() or run.status() == psutil.STATUS_ZOMBIE, "the end of the run"
    )


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
        "from infra.prefect.logs import spawn\n"
        "from infra.prefect.supervisor.workers import worker_command, worker_environment\n"
        "home = Path.cwd()\n"
        "environment = worker_environment(home, 'http://127.0.0.1:1/api')\n"
        "child = spawn(worker_command('gpu'), log=home / 'gpu.log', environment=environment)\n"
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


def test_a_run_whose_worker_died_during_its_imports_saves_and_ends(tmp_path: Path) -> None:
    (tmp_path / "prefect.py").write_text(  # a worker; see above
        f"run = {LATE!r}\n"
        "import os, subprocess, sys, time\n"
        "from pathlib import Path\n"
        "os.environ['PREFECT__FLOW_RUN_ID'] = 'of a run'\n"
        "run = subprocess.Popen([sys.executable, '-c', run], start_new_session=True)\n"
        "Path('new').write_text(str(run.pid))\n"
        "Path('new').rename('run')\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "NANOCHAT_HOME": str(tmp_path)}
    command = worker_command("cpu")
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as worker:
        wait_for((tmp_path / "run").exists, "the run")
        worker.kill()
    (tmp_path / "go").touch()
    run = psutil.Process(int((tmp_path / "run").read_text()))
    try:
        wait_for(lambda: not run.is_running() or (tmp_path / "late").exists(), "the run's end")
        assert (tmp_path / "saved").exists()
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            run.kill()


def test_a_long_log_is_renamed_when_its_process_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "server.log"
    for text in ("early", "old", "new"):
        end = "uvicorn.error - Application shutdown failed. Exiting.\\nAn exception occurred.\\n"
        command = [sys.executable, "-c", f"print('{text}\\n{end}')"]
        assert spawn(command, log=log, environment=os.environ).wait() == 0
        monkeypatch.setattr(logs, "_MAX_LOG", 0 if text == "old" else 1000)

    assert last_line(log) == "new"
    assert log.with_name("server.log.1").read_text().startswith("early\nuvicorn.error - ")
    assert last_line(log.with_name("server.log.1")) == "old"


def test_down_in_a_fresh_home_finds_nothing(tmp_path: Path) -> None:
    assert not stop_stack(tmp_path)


def test_a_gpu_is_for_one_run_and_planning_is_for_several() -> None:
    def limit(pool: str) -> int:
        command = worker_command(pool)
        return int(command[command.index("--limit") + 1])

    assert limit("gpu") == limit("h100x8") == 1
    assert limit("cpu") > 4  # four series would wait for their own runs


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
