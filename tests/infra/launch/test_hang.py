"""A job that stands still is ended, and the rank that stopped first is named."""

import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from infra.launch.hang import Hang, HangWatch, find_place, pulses_of
from infra.launch.torchrun import JobFailed, run_job
from nanochat_core.job import Job, Resources
from nanochat_core.runtime.heartbeat import Heart

WAITS_FOR_RANK_1 = """
import os
import time
from nanochat_core.runtime.heartbeat import HEART
from nanochat_core.runtime.progress import Progress

def stuck():
    while True:
        time.sleep(0.1)

def run(job):
    rank = int(os.environ.get("RANK", "0"))
    (job.directory / f"pid-{rank}").write_text(str(os.getpid()))
    progress = Progress(job.events, active=rank == 0)
    progress.start(1000)
    HEART.watch()
    for step in range(3):
        HEART.beat("gradients", steps=1)
        time.sleep(0.1)
    if rank == int(os.environ.get("WORLD_SIZE", "1")) - 1:
        HEART.beat("gradients")
        stuck()
    time.sleep(0.3)
    HEART.beat("agreeing to go on")
    time.sleep(1000)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "toy_entry.py").write_text(WAITS_FOR_RANK_1)
    return Job(
        directory=tmp_path / "job",
        stage="toy",
        entry="toy_entry",
        fingerprint="f" * 64,
        config={},
        inputs={},
        resources=Resources(
            device="cpu",
            threads=1,
            device_batch_size=1,
            save_every_seconds=1.0,
            eval_every_steps=0,
            dollars_per_hour=0.0,
            hang_seconds=1.0,
        ),
    )


@pytest.mark.torch
def test_the_rank_that_stopped_first_is_named_with_its_stack(job: Job) -> None:
    with pytest.raises(JobFailed) as caught:
        run_job(job, processes=2, on_event=lambda event: None)
    error = caught.value
    assert "toy hangs: nothing has moved for" in str(error)
    assert "rank 1 stopped first (gradients, after 3 steps, at toy_entry.py:" in str(error)
    assert "in stuck" in str(error)
    assert "in stuck" in error.log_tail
    assert "--place hang_seconds=4" in str(error.hint)
    for rank in (0, 1):
        pid = int((job.directory / f"pid-{rank}").read_text())
        assert not psutil.pid_exists(pid)


def test_one_process_that_hangs_is_found_too(job: Job) -> None:
    with pytest.raises(JobFailed, match=r"rank 0 stopped first .*toy_entry.py:\d+ in stuck"):
        run_job(job, processes=1, on_event=lambda event: None)


def test_a_job_is_given_time_and_more_before_its_first_step(job: Job) -> None:
    job = replace(job, resources=replace(job.resources, hang_seconds=600.0))
    job.directory.mkdir()

    def find_after(seconds: float) -> Hang | None:
        return HangWatch(job, clock=lambda: time.monotonic() + seconds).find()

    assert find_after(5000.0) is None  # no rank promised anything
    hearts = [Heart(), Heart()]
    for rank, heart in enumerate(hearts):
        heart.open(pulses_of(job), rank)
        heart.watch()
    assert find_after(2390.0) is None  # it compiles
    found = find_after(2410.0)
    assert found is not None
    assert found.rank == 0
    for rank in (1, 0):
        hearts[rank].beat("agreeing to go on", steps=1)
    assert find_after(590.0) is None
    found = find_after(610.0)
    assert found is not None
    assert (found.rank, found.doing, found.steps) == (1, "agreeing to go on", 1)
    assert found.seconds == pytest.approx(610.0, abs=5.0)
    for heart in hearts:
        heart.rest()
    assert find_after(99999.0) is None


def test_one_rank_that_moves_is_enough(job: Job) -> None:
    """The others may wait for it: it writes the model, say."""
    job = replace(job, resources=replace(job.resources, hang_seconds=0.2))
    job.directory.mkdir()
    hearts = [Heart(), Heart()]
    for rank, heart in enumerate(hearts):
        heart.open(pulses_of(job), rank)
        heart.watch()
        heart.beat("training", steps=1)
    time.sleep(0.3)
    hearts[0].beat("evaluating")
    assert HangWatch(job).find() is None
    time.sleep(0.3)
    assert HangWatch(job).find() is not None


def test_the_place_is_the_main_threads_newest_frame() -> None:
    dump = (
        "hello\nThread 0x01 (most recent call first):\n"
        '  File "/lib/python3.11/threading.py", line 324 in wait\n'
        "\nCurrent thread 0x02 (most recent call first):\n"
        '  File "/work/nanochat_core/train/pretrain.py", line 77 in run\n'
        '  File "/work/nanochat_core/worker.py", line 50 in _run\n'
    )
    assert find_place(dump) == "pretrain.py:77 in run"
    assert find_place("hello") is None
