"""What happens after minutes without a word: silent runs, lost workers."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from infra.prefect.server import Server
from infra.prefect.supervisor.runs import RunWatch
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


@pytest.mark.timeout(600)
def test_a_run_that_is_silent_for_90_s_is_crashed_and_resumed_and_one_that_beats_is_not(
    deploy: Callable[..., Any], api: PrefectApi, server: Server
) -> None:
    dead, alive = (make_run(api, "nanochat/nanochat", "pending", "running") for _ in range(2))
    watch, began = RunWatch(lambda line: None, is_own=True), time.monotonic()
    beats = 0
    while api.state(dead)["name"] not in ("AwaitingRetry", "Late"):
        seconds = time.monotonic() - began
        assert seconds < 120
        if seconds >= 30 * beats:
            beat(api, alive)
            beats += 1
        watch.poll(server.api_url)
        time.sleep(5)
    assert time.monotonic() - began > 85
    assert api.state(alive)["type"] == "RUNNING"
    api.set_state(alive, "completed")


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
