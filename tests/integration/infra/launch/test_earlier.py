"""What an earlier attempt left in a job's directory is waited for, and ended when it is stuck."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from infra.launch import earlier
from infra.launch.earlier import earlier_workers_ended
from infra.launch.torchrun import StageInterrupted
from nanochat_core.job import Job
from nanochat_core.runtime.process_start import start_of
from tests.support.infra.launch.toy_jobs import ToyJobs

# A signal interrupts no mutex, and Python's handler waits for the call to return.
STUCK_IN_C = """
import ctypes, os
def run(job):
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    (job.directory / "pid").write_text(str(os.getpid()))
    libc.pthread_mutex_lock(mutex)
"""
HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
input()
"""


@pytest.fixture
def job(jobs: ToyJobs) -> Job:
    job = jobs.make(STUCK_IN_C)
    job.directory.mkdir()
    return job


@contextlib.contextmanager
def holding(job: Job, rank: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that holds the lock of a rank and has not written its name."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(job.directory / f"worker-{rank}.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture
def holder(job: Job) -> Iterator[subprocess.Popen[bytes]]:
    with holding(job, 0) as process:
        yield process


def wait_for_earlier(seconds: float, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an earlier attempt's worker killed after so many seconds."""
    margin = seconds - job.resources.grace_seconds
    monkeypatch.setattr(earlier, "MARGIN_SECONDS", margin)


def test_a_worker_stuck_in_c_code_is_killed_and_the_next_attempt_runs(
    jobs: ToyJobs, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = jobs.launch(job)
    worker = int(jobs.wait_for_file(job.directory / "pid"))
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    wait_for_earlier(0.5, job, monkeypatch)
    said: list[str] = []

    def note(event: dict[str, Any]) -> None:
        said.append(event["text"])

    result = jobs.run(jobs.body("    return {}"), on_event=note)

    assert result.status == "finished"
    assert start_of(worker) is None
    assert list(dict.fromkeys(said)) == [  # one that takes long to end is killed again
        f"waiting for process {worker} of an earlier attempt to save",
        f"killed process {worker} of an earlier attempt: it had not ended after 0.5 s",
    ]


def test_a_new_attempt_waits_until_an_earlier_one_has_saved_and_believes_no_result_of_it(
    jobs: ToyJobs, job: Job, holder: subprocess.Popen[bytes]
) -> None:
    said: list[str] = []

    def let_it_save(event: dict[str, Any]) -> None:
        said.append(event["text"])
        (job.directory / "result.json").write_text("stale")
        holder.communicate(b"\n")

    result = jobs.run(jobs.body("    return {}"), on_event=let_it_save)

    assert (result.status, holder.returncode) == ("finished", 0)
    assert said == ["waiting for an earlier attempt to save"]


def test_a_stop_ends_the_wait_for_an_earlier_attempt(
    jobs: ToyJobs, job: Job, holder: subprocess.Popen[bytes]
) -> None:
    stop = threading.Event()
    said: list[str] = []

    def stop_then(event: dict[str, Any]) -> None:
        said.append(event["text"])
        stop.set()

    with pytest.raises(StageInterrupted, match="toy was not started: the run is being stopped"):
        jobs.run(job, on_event=stop_then, stop=stop)

    assert said == ["waiting for an earlier attempt to save"]
    assert holder.poll() is None


@pytest.mark.parametrize("elsewhere", ["another process", "another boot", "no name"])
def test_a_worker_that_cannot_be_killed_from_here_is_named_once_with_how_to_find_it(
    job: Job, holder: subprocess.Popen[bytes], elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_earlier(0.1, job, monkeypatch)
    start = start_of(holder.pid)
    assert start is not None
    other = start_of(os.getpid()) if elsewhere == "another process" else f"x{start}"
    lock = job.directory / "worker-0.lock"
    if elsewhere != "no name":
        lock.write_text(json.dumps({"format": 1, "pid": holder.pid, "start": other}))
    name = "" if elsewhere == "no name" else f"process {holder.pid}"
    said: list[str] = []

    class Stop(threading.Event):
        """Set five looks after the second line."""

        looks = 0

        def wait(self, timeout: float | None = None) -> bool:
            self.looks += len(said) == 2
            return self.looks == 5 or super().wait(timeout)

    stop = Stop()
    with earlier_workers_ended(job, said.append, stop) as ended:
        assert not ended

    assert said == [
        f"waiting for {name + ' of ' if name else ''}an earlier attempt to save",
        f"{name or 'a process'} of an earlier attempt has not ended after 0.1 s and cannot be "
        f"killed from here; find it with: fuser {lock}",
    ]
    assert holder.poll() is None


def test_stuck_workers_of_several_ranks_are_waited_for_together(
    job: Job, holder: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_earlier(0.3, job, monkeypatch)
    with holding(job, 1) as second:
        for rank, process in enumerate((holder, second)):
            record = {"format": 1, "pid": process.pid, "start": start_of(process.pid)}
            (job.directory / f"worker-{rank}.lock").write_text(json.dumps(record))
        said: list[str] = []

        with earlier_workers_ended(job, said.append, threading.Event()) as ended:
            assert ended

        kinds = [line.split()[0] for line in dict.fromkeys(said)]
        assert kinds == ["waiting", "waiting", "killed", "killed"]
        assert (holder.wait(), second.wait()) == (-signal.SIGKILL, -signal.SIGKILL)
