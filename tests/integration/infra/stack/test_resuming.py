"""A supervisor resumes the deployed runs whose process died: each once, no others, not for ever."""

import itertools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from infra.prefect.flow_runs import AUTO_RESUME, RESUMES
from infra.prefect.server import Server
from infra.prefect.supervisor import runs
from infra.prefect.supervisor.runs import MAX_RESUMES, RunWatch
from tests.support.deployments.prefect_api import PrefectApi
from tests.support.prefect_login import retry_if_busy

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
        retry_if_busy(lambda: self._watch._poll(self._url))

    def state(self, run: str) -> str:
        return self.api.state(run)["name"]


@pytest.fixture
def watched(server: Server, api: PrefectApi, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(api, server, monkeypatch)


def test_a_crashed_run_is_resumed_once_and_others_stay_as_they_are(watched: Watched) -> None:
    crashed = watched.run("running", "crashed")
    others = {
        watched.run("running", "crashed", tags=()): "Crashed",
        watched.run("running", "failed"): "Failed",
        watched.run("running", "cancelled"): "Cancelled",
        watched.run("running", "completed"): "Completed",
    }
    watched.poll()
    assert watched.state(crashed) == "Crashed"
    for _ in range(3):
        watched.poll(after=11)
    assert watched.state(crashed) == "AwaitingRetry"
    assert len(watched.said) == 1
    assert {run: watched.state(run) for run in others} == others


def test_a_crash_that_is_reported_again_has_to_settle_again(watched: Watched) -> None:
    run = watched.run("running", "crashed")
    watched.poll()
    watched.poll(after=6)
    watched.api.set_state(run, "crashed", "the second report")
    watched.poll(after=5)
    assert watched.state(run) == "Crashed"
    watched.poll(after=11)
    assert watched.state(run) == "AwaitingRetry"


def test_what_is_decided_while_the_watch_looks_at_it_stays(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled, resumed = (watched.run("running", "crashed") for _ in range(2))
    watched.poll()

    def end_task_runs(api_url: str, run: str, why: str) -> None:
        watched.api.set_state(run, "cancelled" if run == cancelled else "running")

    monkeypatch.setattr(runs, "end_task_runs", end_task_runs)
    watched.poll(after=11)
    assert [watched.state(cancelled), watched.state(resumed)] == ["Cancelled", "Running"]


def test_a_run_whose_process_died_during_a_cancel_is_cancelled(watched: Watched) -> None:
    died = watched.run("running", "cancelling", "crashed", "crashed")
    retried = watched.run("running", "cancelling", "cancelled", "scheduled", "running", "crashed")
    never_began = watched.run("pending", "cancelling")
    watched.poll()
    watched.poll(after=11)
    assert [watched.state(died), watched.state(retried)] == ["Cancelled", "AwaitingRetry"]
    assert watched.state(never_began) == "Cancelled"


def test_a_run_that_gets_no_further_is_failed_after_ten_resumes(watched: Watched) -> None:
    run = watched.run("running", "crashed")
    for number in range(1, MAX_RESUMES + 1):
        watched.poll()
        watched.poll(after=11)
        assert watched.state(run) == "AwaitingRetry"
        assert watched.api.get(f"/flow_runs/{run}")["labels"][RESUMES] == number
        watched.api.set_state(run, "crashed")
    watched.poll()
    watched.poll(after=11)
    state = watched.api.state(run)
    assert state["name"] == "Failed"
    assert state["message"].startswith("it was resumed 10 times and got no further\nhint: ")
    watched.poll(after=11)
    assert watched.state(run) == "Failed"


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


def test_what_the_dead_process_began_ends_on_the_pages(
    watched: Watched, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(runs, "end_task_runs", lambda url, run, why: ended.append(run))
    crashed = {watched.run("running", "crashed", tags=tags) for tags in ((AUTO_RESUME,), ())}
    watched.poll()
    for _ in range(2):
        watched.poll(after=11)
    assert sorted(ended) == sorted(crashed)


@pytest.fixture
def beat(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have a run's process send another heartbeat."""
    beats: dict[str, str] = {}
    monkeypatch.setattr(runs, "_heartbeats", lambda url, ids, since: beats)

    def send(run: str) -> None:
        beats[run] = uuid4().hex

    return send


def test_a_run_without_heartbeats_is_crashed_and_one_that_sends_them_is_not(
    watched: Watched, beat: Callable[[str], None]
) -> None:
    dead, alive = watched.run("running", tags=()), watched.run("running")
    resumed, mute = watched.run("running"), watched.run("running")
    beat(dead)
    beat(resumed)
    for _ in range(5):
        beat(alive)
        watched.poll(after=29)
    assert [watched.state(dead), watched.state(alive)] == ["Crashed", "Running"]
    assert watched.api.state(dead)["message"] == "no heartbeat for 90 s"
    assert watched.state(resumed) == "AwaitingRetry"  # at once: no worker reports it again
    assert watched.state(mute) == "Running"  # of one that never sent any, silence says nothing


def test_a_run_that_is_not_started_is_crashed_sooner_in_a_pool_of_processes(
    watched: Watched,
) -> None:
    pools = [f"{kind}-{uuid4().hex}" for kind in ("process", "kubernetes")]
    for pool in pools:
        kind = pool.partition("-")[0]
        watched.api.post("/work_pools/", {"name": pool, "type": kind, "base_job_template": {}})
    process, cluster = (watched.run("pending", tags=(), work_pool_name=pool) for pool in pools)
    watched.poll()
    watched.poll(after=299)
    assert [watched.state(process), watched.state(cluster)] == ["Pending", "Pending"]
    watched.poll(after=2)
    assert [watched.state(process), watched.state(cluster)] == ["Crashed", "Pending"]
    watched.poll(after=3300)
    assert watched.state(cluster) == "Crashed"


def test_a_silent_run_that_ends_while_the_watch_looks_at_it_is_left_alone(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, beat: Callable[[str], None]
) -> None:
    run = watched.run("running")
    beat(run)
    watched.poll()
    is_set = runs.set_state

    def set_state(api_url: str, run: str, *state: Any) -> bool:
        watched.api.set_state(run, "completed")
        return is_set(api_url, run, *state)

    monkeypatch.setattr(runs, "set_state", set_state)
    monkeypatch.setattr(runs, "end_task_runs", lambda *run: pytest.fail("it has ended itself"))
    watched.poll(after=91)
    assert watched.state(run) == "Completed"


def test_runs_of_other_flows_and_of_commands_are_left_alone(watched: Watched) -> None:
    flow = watched.api.post("/flows/", {"name": f"another-{uuid4().hex}"})["id"]
    other = watched.api.post("/deployments/", {"name": "other", "flow_id": flow})
    stranger = watched.api.start(other).json()["id"]
    of_a_command = watched.api.post(
        "/flow_runs/", {"flow_id": watched._flow["id"], "name": "x", "state": {"type": "RUNNING"}}
    )["id"]
    watched.api.set_state(stranger, "running")
    watched.poll()
    watched.poll(after=1000)
    assert [watched.state(stranger), watched.state(of_a_command)] == ["Running", "Running"]


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
