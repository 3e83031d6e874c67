"""Orders carried out by a real process worker: built, stopped, gone on with, refused."""

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts.runs import find_run
from flows.stages import Stage
from infra.prefect.server import Server
from tests.support.flows.fixtures import ENTRY, Toys

pytestmark = pytest.mark.prefect

# Notes each attempt; trains until there is a file `go` beside the homes, and saves when told to
# stop.
TRAINING = """
import os
import time

from nanochat_core.runtime.interrupt import STOP, Interrupted
from nanochat_core.runtime.progress import Progress


def run(job):
    shared = job.directory.parents[3]
    with (shared / "attempts").open("a") as file:
        file.write(job.directory.parents[2].name + "\\n")
    saved = job.checkpoints / "saved"
    progress = Progress(job.events)
    progress.start(1000, step=5 if saved.exists() else 0)
    with STOP.deferred() as stop:
        while not (shared / "go").exists():
            time.sleep(0.02)
            if stop.requested:
                saved.write_text(str(time.time()))
                raise Interrupted
    (job.output / "value.txt").write_text("trained")
    return {"loss": 0.5}
"""


@pytest.fixture(scope="module")
def worker(server: Server) -> Iterator[Any]:
    """A worker of the pool of toys."""
    from tests.support.flows.pools import start_worker, stop_worker

    worker = start_worker()
    yield worker
    stop_worker(worker)


@dataclass
class Play:
    """A test's toys, deployed: first -> train (on the pool) -> last."""

    directory: Path
    toys: Toys
    stages: list[Stage]
    name: str  # a run id that no other test has

    def start(self, run_id: str | None = None, **parameters: Any) -> Any:
        """Start the flow as a person does in Prefect's pages."""
        from tests.support.flows.pools import start_toys

        return start_toys(run_id or self.name, **parameters)

    def go(self) -> None:
        """Let the training come to its end."""
        (self.directory / "go").touch()

    @property
    def attempts(self) -> list[str]:
        """The homes in which the training began, each time."""
        path = self.directory / "attempts"
        return path.read_text().split() if path.exists() else []

    def wait_for_attempts(self, count: int) -> None:
        """Wait until the training has begun so often."""
        from tests.support.flows.pools import wait_until

        wait_until(lambda: len(self.attempts) >= count)

    @property
    def children(self) -> list[Any]:
        """The orders of this test's runs."""
        from tests.support.flows.pools import runs_of

        return [
            run
            for run in runs_of(f"run:{self.name}")
            if any(tag.startswith("request:") for tag in run.tags)
        ]

    def saved(self) -> list[Path]:
        """What the training saved when it was told to stop."""
        return list(self.directory.glob("*/work/train/*/checkpoints/saved"))


@pytest.fixture
def play(toys: Toys, tmp_path: Path, worker: Any) -> Iterator[Play]:
    from tests.support.flows.far_toys import write_table
    from tests.support.flows.pools import deploy, processes_of

    name = f"toy-{uuid.uuid4().hex[:8]}"
    mark = f'\nTEST = "{name}"'  # the server outlives the test
    first = toys.stage("first", source=ENTRY + mark)
    train = toys.stage("train", first, compute="gpu", source=TRAINING + mark)
    stages = [first, train, toys.stage("last", train)]
    write_table(tmp_path, stages)
    deploy(tmp_path)
    yield Play(directory=tmp_path, toys=toys, stages=stages, name=name)
    (tmp_path / "go").touch()
    for process in processes_of(tmp_path):
        process.kill()


def test_a_gpu_stage_runs_on_the_pool_and_its_run_hangs_on_the_callers(play: Play) -> None:
    from tests.support.flows.pools import client, read_run, wait_for_end

    run = play.start()
    play.wait_for_attempts(1)
    play.go()
    state = wait_for_end(run.id)
    assert state.is_completed(), state.message
    assert play.attempts == ["far"]
    [child] = play.children
    assert child.state.is_completed()
    assert child.name.startswith("train/")
    with client() as asking:
        parent = asking.read_task_run(child.parent_task_run_id)
    assert parent.flow_run_id == run.id
    record = find_run(play.toys.context().store, play.name)
    assert record is not None
    assert set(record.stages) == {"first", "train", "last"}
    assert read_run(run.id).run_count == 1


def test_cancelling_the_caller_stops_the_far_job_which_saves_first(play: Play) -> None:
    from tests.support.flows.pools import processes_of, set_state, wait_for_end, wait_until

    run = play.start()
    play.wait_for_attempts(1)
    began = time.monotonic()
    set_state(run.id, "CANCELLING")
    wait_until(play.saved, seconds=30)
    wait_until(lambda: not processes_of(play.directory), seconds=30)
    assert time.monotonic() - began < 30
    assert wait_for_end(run.id).is_cancelled()
    [child] = play.children
    assert wait_for_end(child.id).is_cancelled()


def test_retry_in_the_pages_resumes_with_the_live_order_of_a_killed_run(play: Play) -> None:
    from tests.support.flows.pools import engine_of, set_state, wait_for_end, wait_until

    run = play.start()
    play.wait_for_attempts(1)
    engine_of(run.id).kill()
    assert wait_for_end(run.id).is_crashed()
    time.sleep(8)  # the worker says so twice, and a Retry in between would be overwritten
    set_state(run.id, "SCHEDULED", name="AwaitingRetry", message="Retry from the UI", force=True)
    wait_until(lambda: engine_of(run.id))
    time.sleep(5)
    play.go()
    state = wait_until(lambda: (s := wait_for_end(run.id)).is_completed() and s)
    assert state.is_completed(), state.message
    assert play.attempts == ["far"]
    assert len(play.children) == 1


def test_a_stage_that_is_killed_again_and_again_comes_to_its_end(play: Play) -> None:
    from tests.support.flows.pools import engine_of, processes_of, wait_for_end, wait_until

    run = play.start()
    play.wait_for_attempts(1)
    for process in processes_of(play.directory):
        process.kill()  # as a machine out of memory does
    play.wait_for_attempts(2)
    wait_until(lambda: engine_of(play.children[1].id)).kill()
    play.wait_for_attempts(3)
    for process in processes_of(play.directory):
        process.terminate()  # as a spot machine's notice does
    play.wait_for_attempts(4)
    play.go()
    state = wait_for_end(run.id)
    assert state.is_completed(), state.message
    assert [child.state.type.value for child in play.children] == [*["CRASHED"] * 3, "COMPLETED"]
    wait_until(lambda: not processes_of(play.directory), seconds=30)


def test_a_machine_with_other_code_refuses_the_order_and_it_is_not_retried(play: Play) -> None:
    from tests.support.flows.pools import deploy, wait_for_end

    deploy(play.directory, other_code=True)
    state = wait_for_end(play.start().id)
    assert state.is_failed()
    assert "was requested, but this machine would build train/" in state.message
    assert "\nhint: give worker and caller the same version of the code" in state.message
    assert "Traceback" not in state.message
    [child] = play.children
    assert child.state.is_failed()
    assert not play.attempts
