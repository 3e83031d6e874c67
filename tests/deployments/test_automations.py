"""What Prefect does by itself, on a real server: runs that only the API knows, and their events.

A run whose process died is nothing else to the server than one of which it hears no more.
"""

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.deployments.prefect_api import PrefectApi

pytestmark = pytest.mark.prefect


def test_each_automation_says_in_a_sentence_what_it_does(
    deploy: Callable[..., Any], api: PrefectApi
) -> None:
    ours = [a for name, a in api.automations().items() if name.startswith("nanochat-")]
    assert len(ours) >= 4
    for automation in ours:
        assert automation["description"].endswith("."), automation["name"]
        assert ". " not in automation["description"], automation["name"]
        assert automation["enabled"]


def test_only_deployed_runs_of_our_flows_are_watched(
    deploy: Callable[..., Any], api: PrefectApi
) -> None:
    names = {name.partition("/")[0] for name in deploy().deployments}
    for name, automation in api.automations().items():
        if name.startswith(("nanochat-crash", "nanochat-stuck", "nanochat-auto")):
            related = automation["trigger"]["match_related"]
            [flows] = [r for r in related if r["prefect.resource.role"] == "flow"]
            assert set(flows["prefect.resource.name"]) == names
            assert {"prefect.resource.role": "deployment"} in related


def make_run(api: PrefectApi, name: str, *states: str) -> str:
    """A run of a deployment that went through these states."""
    answer = api.start(api.deployment(name))
    assert answer.status_code == 201
    for state in states:
        api.set_state(answer.json()["id"], state)
    return answer.json()["id"]


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_crash_is_resumed_once_it_has_been_told_for_the_last_time(
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


@pytest.fixture
def posted() -> Iterator[tuple[str, list[Any]]]:
    """An address, and what was posted to it."""
    bodies: list[Any] = []

    class Keeps(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["content-length"]))
            bodies.append((self.headers["content-type"], json.loads(text)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Keeps)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_failed_run_is_posted_with_its_reason_whatever_is_in_it(
    deploy: Callable[..., Any], api: PrefectApi, posted: tuple[str, list[Any]]
) -> None:
    url, bodies = posted
    assert set(deploy(webhook=url).changed) == {
        "nanochat-run-failed",
        "nanochat-pool-not-ready",
        "nanochat-eval-regressed",
    }
    assert deploy(webhook=url).changed == ()
    assert deploy().removed == ()  # without the address those that post stay
    try:
        run = make_run(api, "nanochat/nanochat", "pending", "running")
        name = api.get(f"/flow_runs/{run}")["name"]
        api.set_state(run, "failed", 'it said "no" {{ twice }}\nhint: \\ again')
        deadline = time.monotonic() + 60
        while not bodies and time.monotonic() < deadline:
            time.sleep(0.1)
        [(content_type, body)] = bodies
        assert content_type == "application/json"
        reason = 'it said "no" {{ twice }}\nhint: \\ again'
        assert body == {"text": f"nanochat failed: {name}: {reason}"}
    finally:
        forget_alerts(api)


@pytest.mark.slow
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


def test_the_address_is_nowhere_to_be_read(
    deploy: Callable[..., Any], api: PrefectApi, posted: tuple[str, list[Any]]
) -> None:
    url = f"{posted[0]}/s3cr3t"
    deploy(webhook=url)
    told = json.dumps([api.automations(), api.post("/block_documents/filter", {"limit": 200})])
    assert "s3cr3t" not in told
    assert "nanochat-run-failed" in told
    forget_alerts(api)


def forget_alerts(api: PrefectApi) -> None:
    """As before there was an address."""
    from deployments.alerts import ALERTS

    found = api.automations()
    for name in ALERTS:
        api.delete(f"/automations/{found[name]['id']}")
