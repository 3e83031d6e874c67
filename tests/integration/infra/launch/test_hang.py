"""A job that stands still is ended, and the rank that stopped first is named."""

import time
from dataclasses import replace
from functools import partial

import psutil
import pytest

from flows.building.retry import is_retryable
from infra.launch import torchrun, watchdog
from infra.launch.torchrun import JobFailed
from infra.launch.watchdog import Watchdog, heartbeats_of
from nanochat_core.job import Job
from nanochat_core.runtime.heartbeat import Heartbeat, HeartbeatWriter
from tests.support.infra.launch.toy_jobs import ToyJobs

WAITS_FOR_RANK_1 = """
import os
import time
from nanochat_core.runtime.heartbeat import HEARTBEAT
from nanochat_core.runtime.progress import Progress

def stuck():
    (JOB.directory / "stuck").touch()
    while True:
        time.sleep(0.1)

def run(job):
    global JOB
    JOB = job
    rank = int(os.environ.get("RANK", "0"))
    (job.directory / f"pid-{rank}").write_text(str(os.getpid()))
    progress = Progress(job.events, active=rank == 0)
    progress.start(1000)
    for step in range(3):
        HEARTBEAT.beat("gradients", steps=1)
    if rank == int(os.environ.get("WORLD_SIZE", "1")) - 1:
        HEARTBEAT.beat("gradients")
        stuck()
    while not (job.directory / "stuck").exists():
        time.sleep(0.01)
    HEARTBEAT.beat("agreeing to go on")
    (job.directory / "waiting").touch()
    time.sleep(1000)
"""


HANGS_IN_A_FILE = """
import time
from nanochat_core.data.processes import map_in_processes
from nanochat_core.runtime.progress import Progress

def read(number):
    time.sleep(1000 if number == 5 else 0)
    return number

def run(job):
    progress = Progress(job.events)
    progress.start(8, unit="file")
    for done in map_in_processes(read, list(range(8)), processes=2):
        progress.step(done)
"""


@pytest.fixture
def job(jobs: ToyJobs) -> Job:
    return jobs.make(WAITS_FOR_RANK_1, hang_seconds=500.0)


def look_later(monkeypatch: pytest.MonkeyPatch, job: Job, reached: str) -> None:
    """Have an hour pass for the watchdog when the job has written `reached`, not before.

    The log is then read when a stack is in it.
    """

    def clock() -> float:
        return time.monotonic() + 3600.0 * (job.directory / reached).exists()

    def dump(watch: Watchdog) -> None:
        real(watch)
        while not any("in stuck" in path.read_text() for path in job.directory.rglob("*.log")):
            time.sleep(0.01)

    real = Watchdog.dump_stacks
    monkeypatch.setattr(watchdog, "_SECONDS_FOR_STACKS", 0.0)
    monkeypatch.setattr(Watchdog, "dump_stacks", dump)
    monkeypatch.setattr(torchrun, "Watchdog", partial(Watchdog, clock=clock))


@pytest.mark.torch
def test_the_rank_that_stopped_first_is_named_with_its_stack(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_later(monkeypatch, job, "waiting")
    with pytest.raises(JobFailed) as caught:
        ToyJobs.run(job, 2)
    error = caught.value
    assert "toy hangs: nothing has moved for" in str(error)
    assert "rank 1 stopped first (gradients, after 3 steps)" in str(error)
    assert "in stuck" in error.log_tail
    assert "--place hang_seconds=2000" in str(error.hint)
    for rank in (0, 1):
        pid = int((job.directory / f"pid-{rank}").read_text())
        assert not psutil.pid_exists(pid)


def test_one_process_that_hangs_is_found_too(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    look_later(monkeypatch, job, "stuck")
    with pytest.raises(JobFailed, match="rank 0 stopped first") as caught:
        ToyJobs.run(job)
    assert "in stuck" in caught.value.log_tail


def test_a_stage_that_trains_nothing_is_ended_and_retried_too(jobs: ToyJobs) -> None:
    job = jobs.make(HANGS_IN_A_FILE, hang_seconds=1.0)

    with pytest.raises(JobFailed, match="toy hangs: nothing has moved for") as caught:
        ToyJobs.run(job)

    assert is_retryable(caught.value)


def test_a_job_is_given_its_time_and_more_where_it_declares_it(job: Job) -> None:
    job = replace(job, resources=replace(job.resources, hang_seconds=600.0))
    job.directory.mkdir()

    def find_after(seconds: float) -> tuple[Heartbeat, float] | None:
        return Watchdog(job, clock=lambda: time.monotonic() + seconds).find_hang()

    assert find_after(5000.0) is None  # no worker has begun
    hearts = [HeartbeatWriter(), HeartbeatWriter()]
    for rank, heart in enumerate(hearts):
        heart.open(heartbeats_of(job), rank)
    assert find_after(2390.0) is None  # a model is loaded
    found = find_after(2410.0)
    assert found is not None
    assert found[0].rank == 0
    hearts[0].started()
    assert find_after(2390.0) is None  # rank 1 may still start
    hearts[1].started()
    assert find_after(610.0) is not None
    with hearts[1].busy("compiling", times=3):
        assert find_after(1790.0) is None
        assert find_after(1810.0) is not None
    assert find_after(610.0) is not None
    for rank in (1, 0):
        hearts[rank].beat("agreeing to go on", steps=1)
    assert find_after(590.0) is None
    found = find_after(610.0)
    assert found is not None
    first, silence = found
    assert (first.rank, first.doing, first.steps) == (1, "agreeing to go on", 1)
    assert silence == pytest.approx(610.0, abs=5.0)
