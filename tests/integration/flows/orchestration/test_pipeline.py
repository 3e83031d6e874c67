"""The flow on a real server: it runs a table, reuses it, survives a failure, stops when asked."""

import inspect
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect import flow
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterName,
)

from flows.artifacts.runs import find_run, new_run_id
from flows.orchestration.pipeline import nanochat, run_pipeline
from flows.run_request import RunRequest, options_of
from infra.launch.torchrun import JobFailed
from infra.prefect.server import Server
from nanochat_core.errors import ArtifactError
from tests.support.flows.house import make_run
from tests.support.flows.outage import TERMS, Outage
from tests.support.flows.pools import SECONDS, client
from tests.support.flows.shelf import make_manifest

pytestmark = pytest.mark.prefect


@pytest.fixture
def run_toys(server: Server) -> Callable[..., Any]:
    """Runs a table of toys as a flow; returns its outcome."""

    def run(
        toys: Any,
        stages: list[Any],
        *,
        run_id: str | None = None,
        context: Any = None,
        **options: Any,
    ) -> Any:
        name = run_id or new_run_id("toy", "20261121t000000z")

        @flow(name="toys", flow_run_name=name)
        def toy_flow() -> Any:
            return run_pipeline(stages, context or toys.context(name), make_run(name), **options)

        return toy_flow()

    return run


def of_name(name: str) -> Any:
    """The filter of the flow runs of this name."""
    return FlowRunFilter(name=FlowRunFilterName(any_=[name]))


def flow_run(name: str) -> Any:
    """The one flow run of this name."""
    with client() as asking:
        [found] = asking.read_flow_runs(flow_run_filter=of_name(name))
        return found


def task_runs(flow_run_name: str) -> dict[str, Any]:
    """Stage -> its task run's state, as the server shows it."""
    deadline = time.monotonic() + SECONDS
    with client() as asking:
        while True:  # the server learns of task runs by events, a moment later
            found = asking.read_task_runs(flow_run_filter=of_name(flow_run_name))
            # A task run that never started keeps the suffix Prefect gave to its name.
            states = {run.name.partition("-")[0]: run.state for run in found}
            settled = all(s and (s.is_final() or s.name == "NotReady") for s in states.values())
            if (states and settled) or time.monotonic() > deadline:
                return states
            time.sleep(0.1)


def artifacts(key: str) -> list[Any]:
    """What the flow published under a key, newest first."""
    with client() as asking:
        found = asking.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
        )
    return sorted(found, key=lambda artifact: artifact.created, reverse=True)


def make_table(toys: Any) -> list[Any]:
    """left, right -> join -> end"""
    left, right = toys.stage("left"), toys.stage("right")
    join = toys.stage("join", left, right, compute="gpu")
    return [left, right, join, toys.stage("end", join)]


def test_the_flow_runs_the_table_and_later_runs_compute_only_what_is_redone_or_new(toys, run_toys):
    stages = make_table(toys)

    first = run_toys(toys, stages, run_id="toy-first")
    second = run_toys(toys, stages, run_id="toy-second")

    assert [built.cached for built in first.stages.values()] == [False] * 4
    assert [built.cached for built in second.stages.values()] == [True] * 4
    store = toys.context().store
    assert store.get(first.stages["end"].manifest.files[0].key) == b"left+right+join+end"
    states = task_runs("toy-second")
    assert {name: (s.type.value, s.name) for name, s in states.items()} == dict.fromkeys(
        ("left", "right", "join", "end"), ("COMPLETED", "Cached")
    )
    assert states["end"].message == second.stages["end"].uri
    assert {s.name for s in task_runs("toy-first").values()} == {"Completed"}
    record = find_run(store, "toy-second")
    assert record.status == "finished"
    assert record.ended is not None
    assert record.stages == {n: b.manifest.fingerprint for n, b in second.stages.items()}
    assert artifacts("toy-first-end-metrics")
    assert artifacts("toy-first-end-progress") == []  # a bar is removed when the stage is done

    made = second.stages["left"].manifest
    more = [*stages, toys.stage("more", stages[-1])]
    out = run_toys(toys, more, run_id="toy-part", pinned={"left": made}, redo=frozenset({"join"}))
    # What follows a stage that is redone is reused when its result is the same.
    assert [name for name, built in out.stages.items() if not built.cached] == ["join", "more"]
    assert out.stages["left"].manifest == made
    record = find_run(store, "toy-part")
    assert record.stages["left"] == made.fingerprint


def test_a_run_waits_for_a_store_that_falls_silent(toys, run_toys):
    first = toys.stage("first")
    report = toys.stage("report", first)
    given = run_toys(toys, [first], run_id="toy-earlier").stages["first"].manifest
    context = replace(toys.context("toy-silent"), terms=TERMS)
    outages: list[Any] = []
    for verb, part, data in (
        ("put", "runs/toy-silent", b""),  # the record, as the run begins
        ("get_stored", "first/", b""),  # the given artifact
        ("fetch", "report/", b""),
        ("put", "runs/toy-silent", b'"finished"'),  # the record, as the run ends
    ):
        outages.append(Outage(outages[-1] if outages else context.store, verb, part, data=data))
    out = run_toys(
        toys,
        [first, report],
        run_id="toy-silent",
        context=replace(context, store=outages[-1]),
        pinned={"first": given},
    )
    assert [outage.until is not None for outage in outages] == [True] * 4
    assert set(out.stages) == {"first", "report"}
    record = find_run(context.store, "toy-silent")
    assert record.status == "finished"


def test_a_run_whose_given_artifact_was_collected_since_its_plan_has_failed(toys, run_toys):
    left = toys.stage("left")
    with pytest.raises(ArtifactError, match="was deleted"):
        run_toys(toys, [left], run_id="toy-gone", pinned={"left": make_manifest("left")})
    record = find_run(toys.context().store, "toy-gone")
    assert record.status == "failed"


def test_a_failed_stage_fails_the_run_and_only_the_rest_runs_after_the_fix(toys, run_toys):
    stages = make_table(toys)
    toys.set_broken("join")

    with pytest.raises(JobFailed, match="join failed on rank 0: ValueError: broken"):
        run_toys(toys, stages, run_id="toy-broken")

    states = {name: state.name for name, state in task_runs("toy-broken").items()}
    assert states == {
        "left": "Completed",
        "right": "Completed",
        "join": "Failed",
        "end": "NotReady",
    }
    record = find_run(toys.context().store, "toy-broken")
    assert record.status == "failed"
    assert set(record.stages) == {"left", "right"}

    toys.set_broken("join", False)
    fixed = run_toys(toys, stages)
    assert {name: built.cached for name, built in fixed.stages.items()} == {
        "left": True,
        "right": True,
        "join": False,
        "end": False,
    }


REPOSITORY = Path(__file__).parents[4]
SCRIPT = """
import contextlib
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tests.support.flows.fixtures import Toys
from flows.render.terminal import Display
from flows.orchestration.local_run import ready
from infra.prefect import access

access.ANSWER_SECONDS = 100.0  # the server of all tests may be busy
toys = Toys(root=Path(sys.argv[1]) / "root", home=Path(sys.argv[1]) / "home")
training = toys.stage("training", source=(toys.root / "tasks" / "toy_training.py").read_text())
stages = [training, toys.stage("end", training)]

with (
    contextlib.suppress(KeyboardInterrupt),
    Display(Console(), stages=[stage.name for stage in stages]) as display,
    ready(toys.home, display),
):
    from prefect import flow

    from flows.orchestration import caller, pipeline
    from tests.support.flows.house import make_run

    context = toys.context("toy-stopped")
    context = replace(context, watch=display.watch, stop=caller.LOCAL_RUN.get().stop)

    def build():
        return pipeline.run_pipeline(stages, context, make_run("toy-stopped"))

    @flow(name="toys", flow_run_name=sys.argv[2])
    def toy_flow():
        return caller.end_when_cancelled(build)

    toy_flow()
    sys.exit(0)
sys.exit(130)
"""
TRAINING = """
import time
from nanochat_core.runtime.interrupt import STOP, Interrupted
from nanochat_core.runtime.progress import Progress


def run(job):
    saved = job.checkpoints / "saved"
    progress = Progress(job.events)
    progress.start(1000, step=5 if saved.exists() else 0)
    if not saved.exists():
        with STOP.deferred() as stop:
            while not stop.requested:
                time.sleep(0.02)
            saved.touch()
            raise Interrupted
    (job.output / "value.txt").write_text("trained")
    return {}
"""


@pytest.mark.parametrize("how", ["terminate", "cancel"])
def test_stopping_a_run_lets_workers_save_and_the_next_one_resumes(
    toys, run_toys, api, server, tmp_path, how
):
    training = toys.stage("training", source=TRAINING)
    name = f"stopped-{uuid.uuid4().hex[:8]}"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path), name],
        cwd=REPOSITORY,
        env={**os.environ, "PREFECT_API_URL": server.api_url},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    events = "work/training/*/events.jsonl"
    while not any(path.stat().st_size for path in toys.home.glob(events)):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)

    if how == "cancel":
        api.press_cancel(str(flow_run(name).id))
    else:
        process.send_signal(signal.SIGTERM)
    printed = process.communicate()[0]

    assert process.returncode == 130, printed
    assert "Traceback" not in printed
    assert "training  interrupted" in printed
    assert not any("job.json" in " ".join(p.info["cmdline"] or []) for p in _children_left(toys))
    record = find_run(toys.context().store, "toy-stopped")
    assert record.status == "interrupted"
    assert flow_run(name).state.type.value == ("CANCELLED" if how == "cancel" else "CRASHED")
    assert list(toys.home.glob("work/training/*/checkpoints/saved"))
    if how != "terminate":
        return  # the next run finds the same, however this one was stopped

    again = run_toys(toys, [training])
    assert again.run.status == "finished"
    assert len(again.stages["training"].manifest.provenance.segments) == 2


def _children_left(toys: Any) -> list[psutil.Process]:
    """Worker processes of these toys."""
    found = psutil.process_iter(["cmdline"])
    return [p for p in found if str(toys.home) in " ".join(p.info["cmdline"] or [])]


def test_prefect_sees_the_parameters_of_the_request():
    seen = inspect.signature(nanochat.fn).parameters
    assert set(seen) == set(options_of(RunRequest))
    assert {name: p.default for name, p in seen.items()} == vars(RunRequest())
