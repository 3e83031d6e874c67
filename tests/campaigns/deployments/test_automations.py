"""What Prefect does by itself after minutes: silent and stuck runs, crashes, lost workers."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.deployments.test_automations import forget_alerts, make_run
from tests.support.deployments.prefect_api import PrefectApi

pytestmark = pytest.mark.prefect


def beat(api: PrefectApi, run: str) -> None:
    """What a living process of the run sends every 30 s."""
    from prefect.events import emit_event

    found = api.get(f"/flow_runs/{run}")
    flow = api.get(f"/flows/{found['flow_id']}")
    related = [
        {
            "prefect.resource.id": f"prefect.flow.{flow['id']}",
            "prefect.resource.role": "flow",
            "prefect.resource.name": flow["name"],
        }
    ]
    if found["deployment_id"]:
        deployment = f"prefect.deployment.{found['deployment_id']}"
        related.append({"prefect.resource.id": deployment, "prefect.resource.role": "deployment"})
    emit_event(
        event="prefect.flow-run.heartbeat",
        resource={
            "prefect.resource.id": f"prefect.flow-run.{run}",
            "prefect.resource.name": found["name"],
        },
        related=related,
    )


def wait_for(
    api: PrefectApi, run: str, message: str, *, seconds: float, every: Callable[[], None]
) -> float:
    """Seconds until the run has had a state with this message."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        states = api.get(f"/flow_run_states/?flow_run_id={run}")
        if any(message in (state["message"] or "") for state in states):
            return time.monotonic() - began
        every()
        time.sleep(0.5)
    raise AssertionError(f"no '{message}' within {seconds} s: {api.state(run)}")


def nothing() -> None:
    """Nothing else is going on."""


@pytest.mark.timeout(600)
def test_a_run_that_is_silent_for_90_s_is_crashed_and_resumed_and_others_are_not(
    deploy: Callable[..., Any], api: PrefectApi
) -> None:
    dead, alive = (make_run(api, "nanochat/nanochat", "pending", "running") for _ in range(2))
    flow = api.get(f"/flow_runs/{dead}")["flow_id"]
    by_hand = api.post("/flow_runs/", {"flow_id": flow, "state": {"type": "RUNNING"}})["id"]
    stranger = make_stranger(api)
    for run in (dead, alive, by_hand, stranger):
        beat(api, run)
    last = [time.monotonic()]

    def beating() -> None:
        if time.monotonic() - last[0] > 30:
            last[0] = time.monotonic()
            beat(api, alive)

    took = wait_for(api, dead, "no heartbeat for 90 s", seconds=180, every=beating)
    assert took > 80
    wait_for(api, dead, "resumed by itself", seconds=90, every=beating)
    assert api.state(dead)["name"] in ("AwaitingRetry", "Late")
    for run in (alive, by_hand, stranger):
        assert api.state(run)["type"] == "RUNNING"
        api.set_state(run, "completed")


def make_stranger(api: PrefectApi) -> str:
    """A deployed run of somebody else's flow, which may say every three minutes that it lives."""
    flow = api.post("/flows/", {"name": "somebody-elses"})["id"]
    deployment = api.post("/deployments/", {"name": "theirs", "flow_id": flow})
    run = api.start(deployment).json()["id"]
    api.set_state(run, "running")
    return run


@pytest.mark.timeout(600)
def test_a_run_that_does_not_start_is_crashed_in_pools_of_processes(
    deploy: Callable[..., Any], api: PrefectApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deployments import automations

    with monkeypatch.context() as patch:
        patch.setattr(automations, "PENDING_MINUTES", 1)
        deploy()
    try:
        stuck = make_run(api, "nanochat/nanochat", "pending")
        started = make_run(api, "nanochat/nanochat", "pending", "running")
        took = wait_for(api, stuck, "did not start within 1 min", seconds=150, every=nothing)
        assert took > 50
        assert api.state(started)["type"] == "RUNNING"
        api.set_state(started, "completed")
    finally:
        deploy()


@pytest.mark.timeout(600)
def test_a_crash_is_resumed_once_it_has_been_reported_for_the_last_time(
    deploy: Callable[..., Any], api: PrefectApi
) -> None:
    run = make_run(api, "nanochat/nanochat", "pending", "running", "crashed")
    other = make_run(api, "nanochat/nanochat", "pending", "running", "crashed")
    ordered = api.start(
        api.deployment("one-stage/gpu"),
        **{"stage": "sft", "fingerprint": "0" * 64, "inputs": [], "profile": "tiny"},
        **{"run": "x", "store": "file:///x"},
    ).json()["id"]
    api.set_state(ordered, "crashed")
    time.sleep(6)  # as long as a worker takes to tell of it again
    api.set_state(run, "crashed", "the second report")
    wait_for(api, other, "resumed by itself", seconds=60, every=nothing)
    wait_for(api, run, "resumed by itself", seconds=60, every=nothing)
    names = [s["name"] for s in api.get(f"/flow_run_states/?flow_run_id={run}")]
    assert names.count("AwaitingRetry") == 1
    assert api.state(ordered)["name"] == "Crashed"  # whoever ordered it decides


@pytest.mark.timeout(600)
def test_a_run_that_crashes_again_and_again_is_failed_and_not_resumed(
    deploy: Callable[..., Any], api: PrefectApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deployments import automations

    with monkeypatch.context() as patch:
        patch.setattr(automations, "MOST_CRASHES", 3)
        deploy()
    try:
        run = make_run(api, "nanochat/nanochat", "crashed")
        other = make_run(api, "nanochat/nanochat", "crashed")
        for _ in range(2):
            wait_for(api, run, "resumed by itself", seconds=90, every=nothing)
            while api.state(run)["type"] != "SCHEDULED":
                time.sleep(0.5)
            api.set_state(run, "crashed", "again")
        wait_for(api, run, "crashed 3 times within 60 min", seconds=60, every=nothing)
        wait_for(api, other, "resumed by itself", seconds=90, every=nothing)
        time.sleep(2 * automations.SETTLED_SECONDS)
        assert api.state(run)["type"] == "FAILED"
        assert api.state(other)["type"] == "SCHEDULED"
    finally:
        deploy()


def test_a_pool_whose_worker_is_gone_is_posted(
    deploy: Callable[..., Any], api: PrefectApi, posted: tuple[str, list[Any]]
) -> None:
    url, bodies = posted
    deploy(webhook=url)
    try:
        worker = {"name": "short-lived", "heartbeat_interval_seconds": 2}
        api.post("/work_pools/gpu/workers/heartbeat", worker)
        assert api.get("/work_pools/gpu")["status"] == "READY"
        deadline = time.monotonic() + 120
        while not bodies and time.monotonic() < deadline:
            time.sleep(0.2)
        assert [body for _, body in bodies] == [{"text": "no worker runs for the work pool gpu"}]
    finally:
        forget_alerts(api)
