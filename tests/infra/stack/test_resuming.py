"""Crashed runs that were overlooked are resumed, those that never begin are given up."""

import time
from typing import Any

import pytest

from deployments.automations import resume_crashed
from infra.prefect.access import ask
from infra.prefect.records import Server
from infra.prefect.supervisor import runs
from infra.prefect.supervisor.runs import (
    AUTO_RESUME,
    AUTOMATION,
    MOST_CRASHES,
    SECONDS_OF_AUTOMATION,
    crashed_runs,
    look_for_crashed,
    resume,
)

pytestmark = pytest.mark.prefect
LATER = SECONDS_OF_AUTOMATION + 5


def forgotten(api_url: str, *, now: float) -> list[str]:
    return runs.forgotten(api_url, crashed_runs(api_url), now=now)


def hopeless(api_url: str) -> list[str]:
    return runs.hopeless(api_url, crashed_runs(api_url))


def crashed(server: Server, *, tags: tuple[str, ...] = (AUTO_RESUME,)) -> str:
    """A run that has just crashed."""
    flow = ask(server.api_url, "/flows/", body={"name": "crasher"}, seconds=30)
    body: dict[str, Any] = {"flow_id": flow["id"], "name": "crasher"}
    deployment = ask(server.api_url, "/deployments/", body=body, seconds=30)
    state = {"type": "CRASHED", "name": "Crashed", "message": "gone"}
    body = {**body, "deployment_id": deployment["id"], "tags": tags, "state": state}
    return ask(server.api_url, "/flow_runs/", body=body, seconds=30)["id"]


def state_of(server: Server, run: str) -> str:
    return ask(server.api_url, f"/flow_runs/{run}", seconds=30)["state"]["name"]


@pytest.fixture
def automation(server: Server) -> Any:
    """The automation, as far as it is asked for: whether it is on."""
    from prefect.client.orchestration import get_client

    from deployments.automations import ensure_automation

    with get_client(sync_client=True) as client:
        ensure_automation(client, resume_crashed())
        (found,) = client.read_automations_by_name(AUTOMATION)
        yield found
        client.resume_automation(found.id)


def test_a_run_that_crashed_a_while_ago_is_forgotten(server: Server, automation: Any) -> None:
    run = crashed(server)
    assert run not in forgotten(server.api_url, now=time.time())
    assert run in forgotten(server.api_url, now=time.time() + LATER)
    assert run not in forgotten(server.api_url, now=time.time() + 2 * 3600)


def test_a_run_that_nobody_wants_resumed_is_left(server: Server, automation: Any) -> None:
    assert crashed(server, tags=()) not in forgotten(server.api_url, now=time.time() + LATER)


def test_with_the_automation_off_nothing_is_resumed(server: Server, automation: Any) -> None:
    from prefect.client.orchestration import get_client

    run = crashed(server)
    with get_client(sync_client=True) as client:
        client.pause_automation(automation.id)
    assert run not in forgotten(server.api_url, now=time.time() + LATER)


def test_a_forgotten_run_waits_for_a_worker_again(server: Server, automation: Any) -> None:
    run = crashed(server)
    resume(server.api_url, run)
    assert state_of(server, run) == "AwaitingRetry"
    assert run not in forgotten(server.api_url, now=time.time() + LATER)


def crash_again(server: Server, run: str, *, times: int) -> None:
    """It is resumed and crashes, so often, and never runs."""
    crash = {"type": "CRASHED", "name": "Crashed", "message": "no module named flows"}
    for _ in range(times):
        resume(server.api_url, run)
        body = {"state": crash, "force": True}
        ask(server.api_url, f"/flow_runs/{run}/set_state", body=body, seconds=30)


def test_a_run_that_never_begins_is_given_up(
    server: Server, automation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "forgotten", lambda *_, **__: [])  # runs of other tests
    run = crashed(server, tags=(AUTO_RESUME, "mine"))
    crash_again(server, run, times=MOST_CRASHES - 2)
    assert run not in hopeless(server.api_url)
    crash_again(server, run, times=1)
    assert run in hopeless(server.api_url)
    said: list[str] = []
    look_for_crashed(server.api_url, now=time.time(), log=said.append)
    assert said == [f"run {run}: crashed {MOST_CRASHES} times before it began; given up"]
    found = ask(server.api_url, f"/flow_runs/{run}", seconds=30)
    assert (found["tags"], found["state"]["name"]) == (["mine"], "Crashed")
    assert run not in hopeless(server.api_url)
    assert run not in forgotten(server.api_url, now=time.time() + LATER)


def test_a_run_that_has_begun_counts_its_starts_itself(server: Server, automation: Any) -> None:
    run = crashed(server)
    resume(server.api_url, run)
    for kind in ("PENDING", "RUNNING"):
        body = {"state": {"type": kind}, "force": True}
        ask(server.api_url, f"/flow_runs/{run}/set_state", body=body, seconds=30)
    crash_again(server, run, times=MOST_CRASHES)
    assert run not in hopeless(server.api_url)


def test_without_a_server_nothing_is_raised() -> None:
    look_for_crashed("http://127.0.0.1:9/api", now=time.time(), log=print)
