"""What a supervisor asks of a real Prefect server; tests/unit has what it decides."""

import itertools
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest

from infra.prefect.flow_runs import AUTO_RESUME, RESUMES
from infra.prefect.server import Server
from infra.prefect.supervisor import runs
from infra.prefect.supervisor.runs import MAX_RESUMES, RunWatch
from infra.retry import RetryPolicy, until_answered
from tests.support.deployments.prefect_api import PrefectApi

pytestmark = pytest.mark.prefect


class Watched:
    """A watch over the runs of one flow, with a clock that stands still between two polls."""

    def __init__(self, api: PrefectApi, server: Server, patch: pytest.MonkeyPatch) -> None:
        self.api = api
        self.said: list[str] = []
        self.seconds = 1000.0
        self._url = server.api_url
        self._watch = RunWatch(self.said.append, is_own=True)
        self._flow = api.post("/flows/", {"name": f"watched-{uuid4().hex}"})
        self._names = itertools.count()
        patch.setattr(runs, "FLOWS", (self._flow["name"],))
        patch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: self.seconds))

    def run(self, *states: str, tags: tuple[str, ...] = (AUTO_RESUME,), **more: Any) -> str:
        """Make a deployed run that went through these states."""
        name = f"{self._flow['name']}-{next(self._names)}"
        body = {"flow_id": self._flow["id"], "name": name}
        deployment = self.api.post("/deployments/", body | more)["id"]
        run = self.api.post(
            f"/deployments/{deployment}/create_flow_run", {"name": name, "tags": tags}
        )
        for state in states:
            self.api.set_state(run["id"], state)
        return run["id"]

    def poll(self, *, after: float = 0.0) -> None:
        """Poll the server, so many seconds after the last poll."""
        self.seconds += after
        policy = RetryPolicy(deadline=60.0)  # SQLite may have no time
        until_answered(lambda: self._watch._poll(self._url), httpx.HTTPStatusError, policy=policy)

    def state(self, run: str) -> str:
        return self.api.state(run)["name"]


@pytest.fixture
def watched(server: Server, api: PrefectApi, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(api, server, monkeypatch)


def test_only_deployed_runs_of_our_flows_that_crashed_are_resumed_and_each_once(
    watched: Watched,
) -> None:
    flow = watched.api.post("/flows/", {"name": f"another-{uuid4().hex}"})["id"]
    body = {"flow_id": watched._flow["id"], "name": "x", "tags": [AUTO_RESUME]}
    of_a_command = watched.api.post("/flow_runs/", {**body, "state": {"type": "CRASHED"}})["id"]
    pools = [f"{kind}-{uuid4().hex}" for kind in ("process", "kubernetes")]
    for pool in pools:
        kind = pool.partition("-")[0]
        watched.api.post("/work_pools/", {"name": pool, "type": kind, "base_job_template": {}})
    process, cluster = (watched.run("pending", tags=(), work_pool_name=pool) for pool in pools)
    failing = watched.run("running", "crashed")
    watched.api.patch(f"/flow_runs/{failing}/labels", {RESUMES: MAX_RESUMES})
    expected = {
        watched.run("running", "crashed"): "AwaitingRetry",
        watched.run("running", "crashed", tags=()): "Crashed",
        watched.run("running", "failed"): "Failed",
        watched.run("running", "cancelled"): "Cancelled",
        watched.run("running", "completed"): "Completed",
        watched.run("running"): "Running",  # of one without heartbeats silence says nothing
        # A cancelled run whose process died ends so, unless it was retried since.
        watched.run("running", "cancelling", "crashed", "crashed"): "Cancelled",
        watched.run("running", "cancelling", "cancelled", "running", "crashed"): "AwaitingRetry",
        watched.run("pending", "cancelling"): "Cancelled",
        failing: "Failed",
        process: "Crashed",
        cluster: "Pending",  # where it may wait for a node
        watched.run("running", "crashed", flow_id=flow): "Crashed",
        of_a_command: "Crashed",
    }
    for seconds in (0, 11, 290, 11):
        watched.poll(after=seconds)
    assert {run: watched.state(run) for run in expected} == expected
    assert sum("resumed after a crash" in line for line in watched.said) == 2
    message = watched.api.state(failing)["message"]
    assert message.startswith("it was resumed 10 times and got no further\nhint: ")


def begin(run: str, monkeypatch: pytest.MonkeyPatch, *reached: int | None) -> None:
    """Begin a start of a flow run whose plan has these stages: at a step, or built (None)."""
    from flows.orchestration import flow_setup
    from flows.plan.plan import StagePlan
    from flows.plan.reads import Resume
    from flows.stages import PRETRAIN

    monkeypatch.setattr(flow_setup.flow_run, "get_id", lambda: run)
    monkeypatch.setattr(flow_setup.deployment, "get_id", lambda: "deployed")

    def item(step: int | None) -> StagePlan:
        resume = Resume(step=step, total=900, in_store=True) if step else None
        return StagePlan(stage=PRETRAIN, state="=" if step is None else ">", resume=resume)

    flow_setup.note_progress(map(item, reached))


def test_a_built_stage_or_a_later_checkpoint_begins_the_count_anew(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = watched.run("running")
    counts: list[int] = []
    begin(run, monkeypatch, None, 50, 0)  # what is there when the first start begins
    for reached in ((None, 50, 0), (None, 40, 0), (None, 60, 0), (None, 60, 0), (None, None, 0)):
        watched.api.set_state(run, "crashed")
        watched.poll()
        watched.poll(after=11)
        begin(run, monkeypatch, *reached)
        counts.append(watched.api.get(f"/flow_runs/{run}")["labels"][RESUMES])
    assert counts == [1, 2, 0, 1, 0]


def test_heartbeats_are_read_from_prefects_events(watched: Watched, server: Server) -> None:
    from prefect.events import emit_event

    from tests.support.flows.pools import wait_until

    run = watched.run("running")
    emit_event(
        event="prefect.flow-run.heartbeat",
        resource={"prefect.resource.id": f"prefect.flow-run.{run}"},
    )
    since = datetime.now(UTC) - timedelta(hours=1)

    def beats() -> dict[str, str]:
        return runs._heartbeats(server.api_url, [run, str(uuid4())], since=since)

    [(found, text)] = wait_until(lambda: list(beats().items()))
    assert (found, text[:4]) == (run, "1 20")


def test_prefect_refuses_a_second_resume_of_one_crash(watched: Watched, server: Server) -> None:
    run = watched.run("running", "crashed")
    crash = watched.api.get(f"/flow_runs/{run}")

    def resume() -> bool:
        scheduled = ("SCHEDULED", "resumed", "AwaitingRetry")
        return runs.set_state(server.api_url, run, *scheduled, once=crash["state"]["id"])

    assert [resume(), resume()] == [True, False]
    assert watched.state(run) == "AwaitingRetry"
