"""The flow on a real server: it runs a table, reuses it, survives a failure, stops when asked."""

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

from flows.artifacts.runs import find_run, new_run_id
from infra.prefect.access import ask
from infra.prefect.records import Server
from tests.flows.house import make_run
from tests.flows.test_outage import TERMS, Outage

pytestmark = pytest.mark.prefect


@pytest.fixture
def run_toys(server: Server) -> Callable[..., Any]:
    """Runs a table of toys as a flow; returns its outcome."""
    from prefect import flow

    from flows.orchestration.pipeline import run_pipeline

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


def task_runs(flow_run_name: str) -> dict[str, Any]:
    """Stage -> its task run's state, as the server shows it."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

    chosen = FlowRunFilter(name=FlowRunFilterName(any_=[flow_run_name]))
    deadline = time.monotonic() + 30
    with get_client(sync_client=True) as client:
        while True:  # the server learns of task runs by events, a moment later
            found = client.read_task_runs(flow_run_filter=chosen)
            # A task run that never started keeps the suffix Prefect gave to its name.
            states = {run.name.partition("-")[0]: run.state for run in found}
            settled = all(s.is_final() or s.name == "NotReady" for s in states.values())
            if (states and settled) or time.monotonic() > deadline:
                return states
            time.sleep(0.2)


def artifacts(key: str) -> list[Any]:
    """What the flow published under a key, newest first."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
        )
    return sorted(found, key=lambda artifact: artifact.created, reverse=True)


def make_table(toys: Any) -> list[Any]:
    """left, right -> join -> end"""
    left, right = toys.stage("left"), toys.stage("right")
    join = toys.stage("join", left, right, compute="gpu")
    return [left, right, join, toys.stage("end", join)]


def test_the_flow_builds_on_what_is_given(toys: Any, run_toys: Callable[..., Any]) -> None:
    first = toys.stage("first")
    second = toys.stage("second", first)
    made = run_toys(toys, [first, second], run_id="toy-whole").stages["first"].manifest
    third = toys.stage("third", second)
    out = run_toys(toys, [first, second, third], run_id="toy-part", pinned={"first": made})
    assert [built.cached for built in out.stages.values()] == [True, True, False]
    assert out.stages["first"].manifest == made
    record = find_run(toys.context().store, "toy-part")
    assert record is not None
    assert record.stages["first"] == made.fingerprint


def test_the_flow_runs_the_table_and_a_second_run_computes_nothing(
    toys: Any, run_toys: Callable[..., Any]
) -> None:
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
    assert record is not None
    assert record.status == "finished"
    assert record.ended is not None
    assert record.stages == {n: b.manifest.fingerprint for n, b in second.stages.items()}
    assert artifacts("toy-first-end-metrics")
    assert artifacts("toy-first-end-progress")


@pytest.mark.parametrize(
    ("verb", "part", "data"),
    [
        ("put", "runs/toy-silent", b""),  # the record, as the run begins
        ("get", "first/", b"given"),  # a given artifact
        ("fetch", "report/", b""),
        ("put", "runs/toy-silent", b'"finished"'),  # the record, as the run ends
    ],
)
def test_a_run_waits_for_a_store_that_falls_silent(
    toys: Any, run_toys: Callable[..., Any], verb: str, part: str, data: bytes
) -> None:
    first = toys.stage("first")
    report = toys.stage("report", first)
    given = {}
    if data == b"given":
        given = run_toys(toys, [first], run_id="toy-earlier").stages
    context = replace(toys.context("toy-silent"), terms=TERMS)
    outage: Any = Outage(context.store, verb, part, data=b"" if given else data)
    out = run_toys(
        toys,
        [first, report],
        run_id="toy-silent",
        context=replace(context, store=outage),
        pinned={name: built.manifest for name, built in given.items()},
    )
    assert outage.until is not None
    assert set(out.stages) == {"first", "report"}
    record = find_run(context.store, "toy-silent")
    assert record is not None
    assert record.status == "finished"


def test_a_failed_stage_leaves_a_job_to_replay_and_only_the_rest_runs_after_the_fix(
    toys: Any, run_toys: Callable[..., Any]
) -> None:
    from infra.launch.torchrun import JobFailed

    stages = make_table(toys)
    toys.set_broken("join")

    with pytest.raises(JobFailed, match="join failed on rank 0: ValueError: broken") as caught:
        run_toys(toys, stages, run_id="toy-broken")

    assert caught.value.hint is not None
    path = Path(caught.value.hint.rpartition(" ")[2])
    replay = [sys.executable, "-m", "nanochat_core.worker", str(path)]
    again = subprocess.run(replay, capture_output=True, text=True, check=False, cwd=toys.root)
    assert "ValueError: broken" in again.stderr
    states = {name: state.name for name, state in task_runs("toy-broken").items()}
    assert states == {
        "left": "Completed",
        "right": "Completed",
        "join": "Failed",
        "end": "NotReady",
    }
    record = find_run(toys.context().store, "toy-broken")
    assert record is not None
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


def test_a_stage_is_redone_and_what_follows_is_reused_when_its_result_is_the_same(
    toys: Any, run_toys: Callable[..., Any]
) -> None:
    stages = make_table(toys)
    run_toys(toys, stages)

    outcome = run_toys(toys, stages, redo=frozenset({"join"}))

    assert [name for name, built in outcome.stages.items() if not built.cached] == ["join"]


def test_from_stage_redoes_everything_after_it(toys: Any, server: Server) -> None:
    from flows.stages import stages_to_redo

    stages = make_table(toys)

    assert stages_to_redo(stages, force=(), from_stage="join") == {"join", "end"}
    assert stages_to_redo(stages, force=["left"], from_stage=None) == {"left"}


SCRIPT = """
import contextlib
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

sys.path[:0] = [sys.argv[2], str(Path(sys.argv[2]).parents[1])]
from conftest import Toys
from flows.render.terminal import Display
from flows.orchestration.local_run import ready

toys = Toys(root=Path(sys.argv[1]) / "root", home=Path(sys.argv[1]) / "home")
training = toys.stage("training", source=(toys.root / "tasks" / "toy_training.py").read_text())
stages = [training, toys.stage("quick"), toys.stage("end", training)]

with (
    contextlib.suppress(KeyboardInterrupt),
    Display(Console(), stages=[stage.name for stage in stages]) as display,
    ready(Path(sys.argv[3]), display),
):
    from prefect import flow

    from flows.orchestration import caller, pipeline
    from tests.flows.house import make_run

    if sys.argv[5] == "slow":
        pipeline.SECONDS_TO_STOP, caller.SECONDS_TO_REPORT = -4, 8
    context = toys.context("toy-stopped")
    context = replace(context, watch=display.watch, stop=caller.LOCAL_RUN.get().stop)

    @flow(name="toys", flow_run_name=sys.argv[4])
    @caller.cancellable
    def toy_flow():
        return pipeline.run_pipeline(stages, context, make_run("toy-stopped"))

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


def press_cancel(server: Server, name: str) -> None:
    """What the button of the run's page sends."""
    [run] = find_flow_runs(server, name)
    body = {"state": {"type": "CANCELLING"}, "force": True}
    ask(server.api_url, f"/flow_runs/{run['id']}/set_state", body=body, seconds=30)


def find_flow_runs(server: Server, name: str) -> Any:
    wanted = {"flow_runs": {"name": {"any_": [name]}}}
    return ask(server.api_url, "/flow_runs/filter", body=wanted, seconds=30)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, "cancel", "slow"])
def test_stopping_a_run_lets_workers_save_and_the_next_one_goes_on(
    toys: Any, run_toys: Callable[..., Any], server: Server, tmp_path: Path, how: int | str
) -> None:
    source = TRAINING
    if how == "slow":  # the saving, beside what Prefect gets to be told in
        source = TRAINING.replace("saved.touch()", "time.sleep(10), saved.touch()")
    training = toys.stage("training", source=source)
    name = f"stopped-{uuid.uuid4().hex[:8]}"
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(Path(__file__).parent)]
    environment = {**os.environ, "PREFECT_API_URL": server.api_url}
    process = subprocess.Popen(
        [*command, str(tmp_path / "home"), name, str(how)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    events = "work/training/*/events.jsonl"
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in toys.home.glob(events)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)

    if how == "cancel":
        press_cancel(server, name)
    else:
        process.send_signal(signal.SIGINT if how == "slow" else how)
    printed = process.communicate(timeout=60)[0]

    assert process.returncode == 130, printed
    assert "Traceback" not in printed
    assert "training  interrupted" in printed
    assert not any("job.json" in " ".join(p.info["cmdline"] or []) for p in _children_left(toys))
    record = find_run(toys.context().store, "toy-stopped")
    assert record is not None
    assert record.status == "interrupted"
    [run] = find_flow_runs(server, name)
    assert run["state_type"] == ("CANCELLED" if how == "cancel" else "CRASHED")

    again = run_toys(toys, [training])
    assert again.run.status == "finished"
    assert len(again.stages["training"].manifest.provenance.segments) == 2


def _children_left(toys: Any) -> list[psutil.Process]:
    """Worker processes of these toys."""
    found = psutil.process_iter(["cmdline"])
    return [p for p in found if str(toys.home) in " ".join(p.info["cmdline"] or [])]
