"""Locks, logs and processes of a stack, without one."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from infra.prefect import logs
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
from nanochat_core.runtime.process_start import start_of, this_process
from tests.support.infra.stack.live import wait_for

# What `python -m prefect` finds: a worker with one run, which leads a session as Prefect's runs do.
# {} is what the run does at SIGTERM. It imports until "go" exists.
PREFECT = """
import os, signal, subprocess, sys, time
from pathlib import Path

run = '''
import os, signal, sys, time
from pathlib import Path
from infra.prefect.supervisor.workers import end_with_worker

signal.signal(signal.SIGTERM, {})
while not Path("go").exists():
    time.sleep(0.05)
end_with_worker()
Path("up").touch()
time.sleep(600)
'''
os.environ["PREFECT__FLOW_RUN_ID"] = "of a run"
child = subprocess.Popen([sys.executable, "-c", run], start_new_session=True)
# At SIGTERM Prefect's worker kills its runs before they have saved.
signal.signal(signal.SIGTERM, lambda *_: (child.kill(), os._exit(0)))
words = (os.getpid(), child.pid, "NANOCHAT_LAUNCHER" in os.environ, *sys.argv[1:])
Path("new").write_text(" ".join(map(str, words)))
Path("new").rename("worker")
time.sleep(600)
"""
SAVES = "lambda *_: (time.sleep(0.5), sys.exit(Path('saved').touch()))"  # it takes a while
SUPERVISOR = """
import time
from pathlib import Path
from infra.prefect.logs import spawn
from infra.prefect.supervisor.workers import worker_command, worker_environment

home = Path.cwd()
environment = worker_environment(home, "http://127.0.0.1:1/api")
child = spawn(worker_command("gpu"), log=home / "gpu.log", environment=environment)
time.sleep(600)
"""


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


def test_a_server_that_the_supervisor_restarts_is_not_started_by_another_process(
    tmp_path: Path,
) -> None:
    me = this_process()
    write_record(tmp_path, Server(port=1, pid=me.pid, start="another"))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        with supervisor_lock(tmp_path).open("a") as file:
            start = start_of(other.pid)
            assert start is not None
            replace(me, pid=other.pid, start=start).write(file)

        with pytest.raises(ServerError, match=f"process {other.pid}, `nanochat up`, supervises"):
            start_server(tmp_path)
        other.kill()


@contextlib.contextmanager
def started(
    home: Path, *command: str, at_sigterm: str = SAVES
) -> Generator[tuple["subprocess.Popen[bytes]", list[str], int]]:
    """Run a worker, or what starts one; yield it, the worker's words, and the run's process."""
    (home / "prefect.py").write_text(PREFECT.replace("{}", at_sigterm))
    environment = {**os.environ, "NANOCHAT_HOME": str(home)}
    with subprocess.Popen(command, cwd=home, env=environment, start_new_session=True) as process:
        wait_for((home / "worker").exists, "the run")
        words = (home / "worker").read_text().split()
        try:
            yield process, words, int(words[1])
        finally:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(words[1]), signal.SIGKILL)


@pytest.mark.parametrize(
    ("at_sigterm", "saves"), [(SAVES, True), ("signal.SIG_IGN", False)], ids=["saves", "ignores"]
)
def test_a_run_saves_when_its_worker_is_ended_and_is_killed_if_it_ignores_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_sigterm: str, *, saves: bool
) -> None:
    if not saves:
        monkeypatch.setattr(supervisor_module, "SECONDS_TO_SAVE", 0.1)
    (tmp_path / "go").touch()
    with started(tmp_path, *worker_command("cpu"), at_sigterm=at_sigterm) as (worker, _, run):
        wait_for((tmp_path / "up").exists, "the run")

        end_workers([worker])

        assert worker.returncode == -signal.SIGKILL
        assert (tmp_path / "saved").exists() == saves
        wait_for(lambda: start_of(run) is None, "the end of the run")


def test_a_run_whose_worker_died_during_its_imports_saves_and_ends(tmp_path: Path) -> None:
    with started(tmp_path, *worker_command("cpu")) as (worker, _, run):
        worker.kill()
        worker.wait()
        (tmp_path / "go").touch()
        wait_for(lambda: start_of(run) is None or (tmp_path / "up").exists(), "the run's end")
        assert (tmp_path / "saved").exists()


def test_a_worker_ends_with_its_supervisor(tmp_path: Path) -> None:
    """The program that becomes a worker is killed by the kernel when its parent is killed."""
    (tmp_path / "go").touch()
    with started(tmp_path, sys.executable, "-c", SUPERVISOR) as (supervisor, words, _):
        worker, _, has_launcher, *arguments = words
        assert arguments[:4] == ["worker", "start", "--pool", "gpu"]
        assert has_launcher == "False"  # runs that it starts have another launcher
        supervisor.kill()
        wait_for(lambda: start_of(int(worker)) is None, "the end of the worker")


def test_a_worker_that_has_just_ended_keeps_no_other_from_being_ended() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    wait_for(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE, "its end")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as living:
        end_workers([ended, living])

        assert living.returncode == -signal.SIGKILL


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
    monkeypatch.setenv("PREFECT_API_KEY", "of another server")
    monkeypatch.setenv(AUTH, "ours")

    environment = worker_environment(tmp_path, "http://127.0.0.1:1/api")

    assert environment["NANOCHAT_HOME"] == str(tmp_path)
    assert environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
    assert environment[AUTH] == "ours"
    assert "PREFECT_API_KEY" not in environment
    assert not [value for value in environment.values() if "hidden" in value]
    assert "http" not in " ".join(worker_command("gpu"))
