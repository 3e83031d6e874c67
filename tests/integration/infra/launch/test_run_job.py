"""A job in one process: what `run_job` says of every way it can end."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.launch.torchrun import JobFailed, StageInterrupted, run_job
from nanochat_core.errors import StageError
from nanochat_core.job import Job, Resources
from nanochat_core.runtime.code_record import read_record

RESOURCES = Resources(
    device="cpu",
    threads=1,
    device_batch_size=1,
    save_every_seconds=1.0,
    eval_every_steps=0,
    dollars_per_hour=0.0,
)
SLEEP = """
    import time
    from nanochat_core.runtime.progress import Progress
    progress = Progress(job.events)
    progress.start(1000)
    time.sleep(60)
"""


@pytest.fixture
def make_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job whose entry module has the given body."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(body: str) -> Job:
        lines = "\n".join(line for line in body.splitlines() if line.strip())
        (tmp_path / "toy_entry.py").write_text(f"def run(job):\n{lines}\n")
        return Job(
            directory=tmp_path / "job",
            stage="toy",
            entry="toy_entry",
            fingerprint="f" * 64,
            config={"seed": 1},
            inputs={},
            resources=RESOURCES,
        )

    return make


def ignore(event: dict[str, Any]) -> None:
    """For tests that are not about events."""


def in_thread(job: Job, stop: threading.Event) -> tuple[threading.Thread, list[BaseException]]:
    """Run the job in a thread; returns it and where its error will be."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            run_job(job, processes=1, on_event=ignore, stop=stop)
        except StageError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def wait_for_events(job: Job) -> None:
    """Until the worker is inside its entry module."""
    deadline = time.monotonic() + 120
    while not (job.events.exists() and job.events.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.02)


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
    make_job: Any,
) -> None:
    job = make_job("    (job.output / 'a.txt').write_text('a')\n    return {'answer': 42}")

    result = run_job(job, processes=1, on_event=ignore)

    assert result.status == "finished"
    assert result.metrics == {"answer": 42}
    assert "nanochat_core.job" in {name for name, _ in read_record(job.code)}
    assert (job.output / "a.txt").read_text() == "a"


def test_the_code_of_plugins_is_recorded_also_of_processes_that_the_stage_starts(
    make_job: Any, tmp_path: Path
) -> None:
    (tmp_path / "toy_part.py").write_text("def double(n):\n    return 2 * n\n")
    job = make_job("""
    import multiprocessing
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return {"answer": pool.apply(eval, ("__import__('toy_part').double(21)",))}
""")
    job = replace(job, plugins=("toy_entry", "toy_part"))

    assert run_job(job, processes=1, on_event=ignore).metrics == {"answer": 42}
    assert {"toy_entry", "toy_part"} <= {name for name, _ in read_record(job.code)}


def test_the_worker_gets_its_threads_and_a_fixed_hash_seed(make_job: Any) -> None:
    job = make_job(
        "    import os\n"
        "    return {n: os.environ[n] for n in ('OMP_NUM_THREADS', 'PYTHONHASHSEED',"
        "                                  'TORCHINDUCTOR_COMPILE_THREADS')}"
    )
    job = replace(job, resources=replace(RESOURCES, threads=3))

    metrics = run_job(job, processes=1, on_event=ignore).metrics

    assert metrics == {
        "OMP_NUM_THREADS": "3",
        "PYTHONHASHSEED": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "3",
    }


def test_a_job_gets_no_option_that_is_meant_for_a_torchrun_around_it(
    make_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    job = make_job("    import os\n    return {n: 1 for n in os.environ if n.startswith('PET_')}")
    assert run_job(job, processes=1, on_event=ignore).metrics == {}


def test_every_event_of_this_attempt_arrives_in_order_and_none_of_an_earlier_one(
    make_job: Any,
) -> None:
    job = make_job("""
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

    run_job(job, processes=1, on_event=seen.append)

    assert seen[0]["kind"] == "start"
    assert [event["step"] for event in seen[1:]] == list(range(1, 51))


def test_a_persons_mistake_keeps_its_message_and_hint(make_job: Any) -> None:
    job = make_job("""
    from nanochat_core.errors import DataError
    raise DataError("shard 3 has no column `text`", hint="delete it")
""")

    with pytest.raises(StageError, match=r"^toy: shard 3 has no column `text`$") as caught:
        run_job(job, processes=1, on_event=ignore)

    assert caught.value.hint == "delete it"


def test_a_bug_is_reported_with_its_log_and_the_line_that_replays_it(make_job: Any) -> None:
    job = make_job("    print('so far so good')\n    return [][1]")

    with pytest.raises(JobFailed) as caught:
        run_job(job, processes=1, on_event=ignore)

    error = caught.value
    assert str(error) == "toy failed on rank 0: IndexError: list index out of range"
    assert "so far so good" in error.log_tail
    assert "Traceback" in error.log_tail
    assert error.hint is not None
    replay = error.hint.partition("replay it with: python ")[2].split()
    again = subprocess.run([sys.executable, *replay], check=False, capture_output=True, text=True)
    assert "IndexError" in again.stderr


def test_a_killed_worker_is_no_result(make_job: Any) -> None:
    job = make_job("    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)")

    with pytest.raises(JobFailed, match="killed by SIGKILL"):
        run_job(job, processes=1, on_event=ignore)


def test_results_of_an_earlier_attempt_are_not_believed(make_job: Any) -> None:
    run_job(make_job("    return {}"), processes=1, on_event=ignore)

    with pytest.raises(JobFailed):
        run_job(make_job("    raise ValueError"), processes=1, on_event=ignore)
    assert run_job(make_job("    return {'n': 2}"), processes=1, on_event=ignore).metrics == {
        "n": 2
    }


def test_a_worker_that_gets_sigterm_is_interrupted(make_job: Any) -> None:
    job = make_job(SLEEP)
    thread, errors = in_thread(job, threading.Event())
    wait_for_events(job)

    for worker in workers_of(job.directory):
        worker.terminate()
    thread.join(120)

    assert [type(error) for error in errors] == [StageInterrupted]


def test_a_worker_that_is_stopped_while_it_hashes_the_output_is_interrupted(make_job: Any) -> None:
    job = make_job("""
    import os, signal
    from nanochat_core.runtime.heartbeat import HEARTBEAT
    (job.output / 'a.txt').write_text('a')
    HEARTBEAT.beat = lambda doing: os.kill(os.getpid(), signal.SIGTERM)
    return {}
""")
    with pytest.raises(StageInterrupted):
        run_job(job, processes=1, on_event=ignore)


def test_setting_stop_interrupts_the_job(make_job: Any) -> None:
    job = make_job(SLEEP)
    stop = threading.Event()
    thread, errors = in_thread(job, stop)
    wait_for_events(job)

    stop.set()
    thread.join(120)

    assert [type(error) for error in errors] == [StageInterrupted]
    assert not workers_of(job.directory)


def test_an_exception_in_the_launcher_stops_the_worker_first(make_job: Any) -> None:
    job = make_job(SLEEP)

    def fail(event: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(job, processes=1, on_event=fail)

    assert not workers_of(job.directory)
    assert json.loads((job.directory / "result.json").read_text())["status"] == "interrupted"


def test_a_new_attempt_waits_until_the_workers_of_a_killed_one_have_saved(make_job: Any) -> None:
    job = make_job("    return {}")
    job.directory.mkdir()
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
            "print(flush=True); sys.stdin.read(); open(sys.argv[2], 'w').write('stale')",
            str(job.directory / "worker-0.lock"),
            str(job.directory / "result.json"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    seen: list[dict[str, Any]] = []

    def let_it_save(event: dict[str, Any]) -> None:
        seen.append(event)
        assert holder.stdin is not None
        holder.stdin.close()

    result = run_job(job, processes=1, on_event=let_it_save)

    assert holder.wait() == 0
    holder.stdout.close()
    assert result.status == "finished"
    assert seen == [{"kind": "message", "text": "waiting for an earlier attempt to save"}]


def test_kill_9_of_the_launcher_leaves_no_worker(make_job: Any, tmp_path: Path) -> None:
    job = make_job(SLEEP)
    job.directory.mkdir()
    job.write()
    script = (
        "import sys; from pathlib import Path; from infra.launch.torchrun import run_job;"
        "from nanochat_core.job import Job;"
        "run_job(Job.read(Path(sys.argv[1])), processes=1, on_event=lambda event: None)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script, str(job.directory / "job.json")])
    wait_for_events(job)
    assert len(workers_of(job.directory)) == 2  # the launcher has the path in its command too

    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()

    deadline = time.monotonic() + 120
    while workers_of(job.directory):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert json.loads((job.directory / "result.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize(("grace", "saved"), [(60.0, True), (6.0, False)])
def test_a_job_that_is_stopped_has_the_grace_of_its_resources_to_save(
    make_job: Any, grace: float, saved: bool
) -> None:
    job = make_job(
        """
    import time
    from nanochat_core.runtime.interrupt import STOP
    with STOP.deferred():
        (job.directory / "up").touch()
        while not STOP.requested:
            time.sleep(0.01)
        for _ in range(400):  # 4 s: longer than the smaller grace leaves, shorter than the larger
            time.sleep(0.01)
        (job.directory / "saved").touch()
"""
    )
    job = replace(job, resources=replace(RESOURCES, grace_seconds=grace))
    stop = threading.Event()
    running, errors = in_thread(job, stop)
    while not (job.directory / "up").exists():
        time.sleep(0.02)
    stop.set()
    running.join()
    assert (job.directory / "saved").exists() == saved
    assert isinstance(errors[0], StageError)
