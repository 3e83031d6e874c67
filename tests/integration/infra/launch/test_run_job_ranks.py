"""A job in two processes under torchrun."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from flows.building.retry import is_retryable
from infra.launch.fitting import fitting
from infra.launch.torchrun import JobFailed
from nanochat_core.errors import OutOfMemory
from nanochat_core.job import Result
from nanochat_core.runtime.code_record import read_record
from tests.support.flows.waiting import wait_until
from tests.support.infra.launch.toy_jobs import ToyJobs

pytestmark = pytest.mark.torch

RANKS_TRAIN = """
import os
import time
from nanochat_core.runtime.interrupt import STOP, Interrupted
from nanochat_core.runtime.progress import Progress


def run(job):
    rank = int(os.environ["RANK"])
    progress = Progress(job.events, active=rank == 0)
    print("rank", rank, "of", os.environ["WORLD_SIZE"])
    with STOP.deferred() as stop:
        (job.directory / f"pid-{rank}").write_text(str(os.getpid()))
        progress.start(1000)
        while not stop.requested:
            time.sleep(0.05)
        time.sleep(0.3)
        (job.checkpoints / f"saved-{rank}").touch()
        raise Interrupted
"""


def test_ranks_of_one_machine_meet_where_no_host_can_reach_them_and_each_records_its_code(
    jobs: ToyJobs,
) -> None:
    job = jobs.make("""
import os
import psutil
import torch
from nanochat_core.runtime.hardware.distributed import open_world

def run(job):
    world = open_world(torch.device("cpu"))
    agent = psutil.Process(os.getppid())
    heard = [c.laddr.ip for c in agent.net_connections() if c.status == psutil.CONN_LISTEN]
    found = world.gather({"port": int(os.environ["MASTER_PORT"]), "heard": heard})
    if world.is_first:
        (job.directory / "found").write_text(repr([found[0] == found[1], set(found[0]["heard"])]))
    else:
        import nanochat_core.scaling
    return {}
""")
    jobs.run(job, 2)
    assert (job.directory / "found").read_text() == "[True, {'127.0.0.1'}]"
    assert "nanochat_core.scaling" in {name for name, _ in read_record(job.code)}


def test_a_failing_rank_is_named_although_the_others_are_interrupted(jobs: ToyJobs) -> None:
    job = jobs.make("""
import os
import time

def run(job):
    if os.environ["RANK"] == "1":
        print("I am rank one")
        raise ValueError("no good")
    time.sleep(60)
""")

    with pytest.raises(JobFailed, match="toy failed on rank 1: ValueError: no good") as caught:
        jobs.run(job, 2)

    assert "ValueError: no good" in caught.value.log_tail


def test_one_rank_without_memory_ends_the_job_and_its_size_is_remembered(jobs: ToyJobs) -> None:
    job = jobs.make("""
import os
import time
from nanochat_core.errors import OutOfMemory

def run(job):
    if os.environ["RANK"] == "1":
        raise OutOfMemory("out of memory", hint="give less")
    time.sleep(60)
""")
    job = replace(job, resources=replace(job.resources, device_batch_size=12))

    with pytest.raises(OutOfMemory, match="toy: out of memory") as caught:
        jobs.run(job, 2)

    assert (caught.value.hint, is_retryable(caught.value)) == ("give less", True)
    for size, fits in ((12, 6), (6, 6), (24, 24)):
        given = replace(job, resources=replace(job.resources, device_batch_size=size))
        assert fitting(given).resources.device_batch_size == fits


def test_kill_9_of_the_launcher_lets_every_rank_save_and_leaves_none(jobs: ToyJobs) -> None:
    job = jobs.make(RANKS_TRAIN)
    launcher = jobs.launch(job, 2)
    ranks = [int(jobs.wait_for_file(job.directory / f"pid-{rank}")) for rank in (0, 1)]

    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()

    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in ranks))
    assert {path.name for path in job.checkpoints.iterdir()} == {"saved-0", "saved-1"}
    result = Result.find(job.directory)
    assert result is not None
    assert result.status == "interrupted"


@pytest.mark.parametrize("launched", [True, False])
def test_a_rank_that_starts_late_leaves_the_error_of_one_that_failed(
    jobs: ToyJobs, launched: bool
) -> None:
    """Only a job that is replayed by hand finds what an attempt before it left behind."""
    job = jobs.make("def run(job):\n    return {}\n")
    job.directory.mkdir()
    path = job.write()
    (job.directory / "error.json").write_text('{"rank": 1}')
    environment = {k: v for k, v in os.environ.items() if k != "NANOCHAT_LAUNCHER"}
    if launched:
        environment["NANOCHAT_LAUNCHER"] = str(os.getpid())

    command = [sys.executable, "-m", "nanochat_core.worker", str(path)]
    subprocess.run(command, env=environment | {"RANK": "0"}, check=True)

    assert (job.directory / "error.json").exists() == launched
    assert (job.directory / "result.json").exists()
