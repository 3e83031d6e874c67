"""A lost stage is started again in the same run; a mistake is not, and no stage waits in vain."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts.runs import Run, write_run
from flows.building.retry import TransientStageError
from flows.orchestration import flow_setup, pipeline, stage_task
from infra.launch.torchrun import JobFailed
from infra.storage.local import LocalStore
from nanochat_core.errors import StageError
from tests.integration.flows.orchestration.test_pipeline import of_name, task_runs
from tests.support.flows.house import make_run
from tests.support.flows.outage import Outage
from tests.support.flows.pools import client

pytestmark = pytest.mark.prefect

# Killed in the first three attempts.
KILLED = """
import os
import signal


def run(job):
    marks = job.checkpoints / "attempts"
    tried = marks.read_text() if marks.exists() else ""
    marks.write_text(tried + ".")
    if len(tried) < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    (job.output / "value.txt").write_text("made")
    return {}
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.retry.FIRST_PAUSE", 0.1)


def run_counts(flow_run_name: str) -> dict[str, int]:
    """Stage -> how often its task ran, as the server shows it."""
    task_runs(flow_run_name)  # the server has heard of all
    with client() as asking:
        found = asking.read_task_runs(flow_run_filter=of_name(flow_run_name))
        return {run.name: run.run_count for run in found}


def test_a_killed_stage_is_started_again_so_often_and_the_pages_show_the_attempts(toys, run_toys):
    stage = toys.stage("killed", source=KILLED)
    with pytest.raises(JobFailed, match="killed by SIGKILL"):
        run_toys(toys, [stage], run_id="toy-twice", retries=1)
    assert run_counts("toy-twice") == {"killed": 2}
    assert task_runs("toy-twice")["killed"].is_failed()
    made = run_toys(toys, [stage, toys.stage("end", stage)], run_id="toy-again", retries=1)
    assert not made.stages["killed"].cached
    assert run_counts("toy-again") == {"killed": 2, "end": 1}
    assert "waiting" in toys.kinds("killed")


def test_an_error_of_the_code_is_not_tried_again(toys, run_toys):
    toys.set_broken("first")
    with pytest.raises(JobFailed, match="ValueError: broken"):
        run_toys(toys, [toys.stage("first")], run_id="toy-error", retries=3)
    assert run_counts("toy-error") == {"first": 1}


def test_a_run_that_is_stopped_does_not_wait_for_its_next_attempt(toys, monkeypatch):
    monkeypatch.setattr(stage_task.task_run, "get_run_count", lambda: 2)
    context = replace(toys.context(), stop=threading.Event())
    threading.Timer(0.2, context.stop.set).start()
    with pytest.raises(StageError, match="the run is being stopped"):
        stage_task._pause(toys.stage("first"), context, 600.0)  # past the test's own time


@pytest.fixture
def begun(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Any], Run]:
    """Return a function that starts a run of that id with a store, until stages would be built."""

    def begin(name: str, store: Any) -> Run:
        runs: list[Run] = []

        def stop(stages: Any, context: Any, run: Run, **options: Any) -> Any:
            runs.append(run)
            raise TransientStageError("this is where stages are built")

        monkeypatch.setenv("NANOCHAT_HOME", str(tmp_path))
        monkeypatch.setattr(flow_setup, "open_store", lambda url: store)
        monkeypatch.setattr(pipeline, "run_pipeline", stop)
        monkeypatch.setattr(flow_setup.flow_run, "get_name", lambda: name)
        with pytest.raises(TransientStageError, match="this is where stages are built"):
            pipeline.nanochat(store=store.url)
        return runs[0]

    return begin


@pytest.mark.parametrize("part", ["runs/one", "/manifest.json"])  # its record, and the plan
def test_a_run_that_begins_while_the_store_is_silent_waits(begun, tmp_path, part):
    outage: Any = Outage(LocalStore(tmp_path / "store"), "get_stored", part, seconds=0.2)
    begun("one", outage)
    assert outage.until is not None


def test_a_run_that_is_started_again_keeps_the_time_and_the_pins_of_its_first_start(
    begun, tmp_path, monkeypatch
):
    store, known, plan = LocalStore(tmp_path / "store"), [], pipeline.plan_run
    monkeypatch.setattr(
        pipeline, "plan_run", lambda *a, **k: known.append(k["known"]) or plan(*a, **k)
    )
    first = replace(make_run("one"), started="2026-01-01T00:00:00Z", upstream={"a@main": "c"})
    write_run(store, first)
    assert begun("one", store).started == "2026-01-01T00:00:00Z"
    assert begun("two", store).started > "2026-01-01T00:00:00Z"
    assert known == [{"a@main": "c"}, {}]
