"""A job in one process: what `run_job` says of every way it can end."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.launch.torchrun import JobFailed, StageInterrupted
from nanochat_core.errors import StageError
from nanochat_core.job import Job
from nanochat_core.runtime.code_record import read_record
from tests.support.flows.waiting import wait_until
from tests.support.infra.launch.toy_jobs import ToyJobs

SLEEP = """
    import time
    from nanochat_core.runtime.progress import Progress
    progress = Progress(job.events)
    progress.start(1000)
    time.sleep(60)
"""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def wait_for_events(job: Job) -> None:
    """Wait until the worker is inside its entry module."""
    wait_until(lambda: job.events.exists() and job.events.stat().st_size)


def workers_of(directory: Path) -> list[psutil.Process]:
    """Live worker processes of a job directory."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        is_dead = process.info["status"] == psutil.STATUS_ZOMBIE
        if str(directory / "job.json") in command and not is_dead:
            found.append(process)
    return found


def test_a_finished_job_returns_its_metrics_and_records_the_modules_it_imported(
    jobs: ToyJobs,
) -> None:
    job = jobs.body("    (job.output / 'a.txt').write_text('a')\n    return {'answer': 42}")

    result = jobs.run(job)

    assert result.status == "finished"
    assert result.metrics == {"answer": 42}
    assert "nanochat_core.job" in {name for name, _ in read_record(job.code)}
    assert (job.output / "a.txt").read_text() == "a"


def test_the_code_of_plugins_is_recorded_also_of_processes_that_the_stage_starts(
    jobs: ToyJobs, tmp_path: Path
) -> None:
    (tmp_path / "toy_part.py").write_text("def double(n):\n    return 2 * n\n")
    job = jobs.body("""
    import multiprocessing
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return {"answer": pool.apply(eval, ("__import__('toy_part').double(21)",))}
""")
    job = replace(job, plugins=("toy_entry", "toy_part"))

    assert jobs.run(job).metrics == {"answer": 42}
    assert {"toy_entry", "toy_part"} <= {name for name, _ in read_record(job.code)}


def test_the_environment_of_a_worker(jobs: ToyJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")  # meant for a torchrun around it
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    job = jobs.body("""
    import os
    own = ("OMP_NUM_THREADS", "PYTHONHASHSEED", "TORCHINDUCTOR_COMPILE_THREADS")
    return {name: value for name, value in os.environ.items() if name in own or "PET_" in name}
""")
    job = replace(job, resources=replace(job.resources, threads=3))

    assert jobs.run(job).metrics == {
        "OMP_NUM_THREADS": "3",
        "PYTHONHASHSEED": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "3",
    }


def test_every_event_of_this_attempt_arrives_in_order_and_none_of_an_earlier_one(
    jobs: ToyJobs,
) -> None:
    job = jobs.body("""
    from nanochat_core.runtime.progress import Progress
    progress = Progress(job.events)
    progress.start(50)
    for step in range(1, 51):
        progress.step(step, loss=1.0 / step)
    return {}
""")
    job.directory.mkdir()
    job.events.write_text('{"kind": "step", "step": 7, "values": {}}\n{"kind": "st')
    seen: list[dict[str, Any]] = []

    jobs.run(job, on_event=seen.append)

    assert seen[0]["kind"] == "start"
    assert [event["step"] for event in seen[1:]] == list(range(1, 51))


def test_a_persons_mistake_keeps_its_message_and_hint(jobs: ToyJobs) -> None:
    job = jobs.body("""
    from nanochat_core.errors import DataError
    raise DataError("shard 3 has no column `text`", hint="delete it")
""")

    with pytest.raises(StageError, match=r"^toy: shard 3 has no column `text`$") as caught:
        jobs.run(job)

    assert caught.value.hint == "delete it"


def test_a_bug_is_reported_with_its_log_and_the_line_that_replays_it(jobs: ToyJobs) -> None:
    job = jobs.body("    print('so far so good')\n    return [][1]")

    with pytest.raises(JobFailed) as caught:
        jobs.run(job)

    error = caught.value
    assert str(error) == "toy failed on rank 0: IndexError: list index out of range"
    assert "so far so good" in error.log_tail
    assert "Traceback" in error.log_tail
    assert error.hint is not None
    replay = error.hint.partition("replay it with: python ")[2].split()
    again = subprocess.run([sys.executable, *replay], check=False, capture_output=True, text=True)
    assert "IndexError" in again.stderr


def test_a_killed_worker_is_no_result(jobs: ToyJobs) -> None:
    job = jobs.body("    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)")

    with pytest.raises(JobFailed, match="killed by SIGKILL"):
        jobs.run(job)


def test_results_of_an_earlier_attempt_are_not_believed(jobs: ToyJobs) -> None:
    jobs.run(jobs.body("    return {}"))

    with pytest.raises(JobFailed):
        jobs.run(jobs.body("    raise ValueError"))
    assert jobs.run(jobs.body("    return {'n': 2}")).metrics == {"n": 2}


def test_a_worker_that_gets_sigterm_is_interrupted(jobs: ToyJobs, pool: ThreadPoolExecutor) -> None:
    job = jobs.body(SLEEP)
    running = pool.submit(jobs.run, job)
    wait_for_events(job)

    for worker in workers_of(job.directory):
        worker.terminate()

    assert isinstance(running.exception(120), StageInterrupted)


def test_a_worker_that_is_stopped_while_it_hashes_the_output_is_interrupted(jobs: ToyJobs) -> None:
    job = jobs.body("""
    import os, signal
    from nanochat_core.runtime.heartbeat import HEARTBEAT
    (job.output / 'a.txt').write_text('a')
    HEARTBEAT.beat = lambda doing: os.kill(os.getpid(), signal.SIGTERM)
    return {}
""")
    with pytest.raises(StageInterrupted):
        jobs.run(job)


def test_an_exception_in_the_launcher_stops_the_worker_first(jobs: ToyJobs) -> None:
    job = jobs.body(SLEEP)

    def fail(event: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        jobs.run(job, on_event=fail)

    assert not workers_of(job.directory)
    assert json.loads((job.directory / "result.json").read_text())["status"] == "interrupted"


def test_kill_9_of_the_launcher_leaves_no_worker(jobs: ToyJobs) -> None:
    job = jobs.body(SLEEP)
    launcher = jobs.launch(job)
    wait_for_events(job)
    assert len(workers_of(job.directory)) == 1

    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()

    wait_until(lambda: not workers_of(job.directory))
    assert json.loads((job.directory / "result.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize(("grace", "saved"), [(60.0, True), (6.0, False)])
def test_a_job_that_is_stopped_has_the_grace_of_its_resources_to_save(
    jobs: ToyJobs, pool: ThreadPoolExecutor, grace: float, saved: bool
) -> None:
    job = jobs.body("""
    import time
    from nanochat_core.runtime.interrupt import STOP
    with STOP.deferred():
        (job.directory / "up").touch()
        while not STOP.requested:
            time.sleep(0.01)
        for _ in range(400):  # 4 s: longer than the smaller grace leaves, shorter than the larger
            time.sleep(0.01)
        (job.directory / "saved").touch()
""")
    job = replace(job, resources=replace(job.resources, grace_seconds=grace))
    stop = threading.Event()
    running = pool.submit(jobs.run, job, stop=stop)
    wait_until((job.directory / "up").exists)
    stop.set()
    assert isinstance(running.exception(120), StageInterrupted)
    assert (job.directory / "saved").exists() == saved
    assert not workers_of(job.directory)
