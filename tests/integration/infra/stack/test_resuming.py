"""Crashed runs that were overlooked are resumed, those that never begin are given up."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from deployments.automations import resume_crashed
from infra.prefect.records import Server
from infra.prefect.supervisor import runs
from infra.prefect.supervisor.runs import (
    AUTO_RESUME,
    AUTOMATION,
    MOST_CRASHES,
    SECONDS_OF_AUTOMATION,
    crashed_runs,
    look_for_crashed,
)
from tests.support.deployments.prefect_api import PrefectApi
from tests.support.prefect_login import retry_if_busy

pytestmark = pytest.mark.prefect
LATER = SECONDS_OF_AUTOMATION + 5


def forgotten(api_url: str, *, now: float) -> list[str]:
    return retry_if_busy(lambda: runs.forgotten(api_url, crashed_runs(api_url), now=now))


def hopeless(api_url: str) -> list[str]:
    return retry_if_busy(lambda: runs.hopeless(api_url, crashed_runs(api_url)))


def resume(server: Server, run: str) -> None:
    retry_if_busy(lambda: runs.resume(server.api_url, run))


@pytest.fixture
def crashed(api: PrefectApi) -> Callable[..., str]:
    """Makes a run that has just crashed."""

    def make(*, tags: tuple[str, ...] = (AUTO_RESUME,)) -> str:
        body = {"flow_id": api.post("/flows/", {"name": "crasher"})["id"], "name": "crasher"}
        deployment = api.post("/deployments/", body)["id"]
        state = {"type": "CRASHED", "name": "Crashed", "message": "gone"}
        body = {**body, "deployment_id": deployment, "tags": tags, "state": state}
        return api.post("/flow_runs/", body)["id"]

    return make


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


def test_a_run_that_crashed_a_while_ago_is_forgotten(
    server: Server, automation: Any, crashed: Callable[..., str]
) -> None:
    run, unwanted = crashed(), crashed(tags=())
    assert run not in forgotten(server.api_url, now=time.time())
    found = forgotten(server.api_url, now=time.time() + LATER)
    assert run in found
    assert unwanted not in found
    assert run not in forgotten(server.api_url, now=time.time() + 2 * 3600)


def test_with_the_automation_off_nothing_is_resumed(
    server: Server, automation: Any, crashed: Callable[..., str]
) -> None:
    from prefect.client.orchestration import get_client

    run = crashed()
    with get_client(sync_client=True) as client:
        client.pause_automation(automation.id)
    assert run not in forgotten(server.api_url, now=time.time() + LATER)


def test_a_forgotten_run_waits_for_a_worker_again(
    server: Server, automation: Any, api: PrefectApi, crashed: Callable[..., str]
) -> None:
    run = crashed()
    resume(server, run)
    assert api.state(run)["name"] == "AwaitingRetry"
    assert run not in forgotten(server.api_url, now=time.time() + LATER)


def crash_again(server: Server, api: PrefectApi, run: str, *, times: int) -> None:
    """It is resumed and crashes, so often, and never runs."""
    for _ in range(times):
        resume(server, run)
        api.set_state(run, "crashed", "no module named flows")


def test_a_run_that_never_begins_is_given_up(
    server: Server,
    automation: Any,
    api: PrefectApi,
    crashed: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "forgotten", lambda *_, **__: [])  # runs of other tests
    run = crashed(tags=(AUTO_RESUME, "mine"))
    crash_again(server, api, run, times=MOST_CRASHES - 2)
    assert run not in hopeless(server.api_url)
    crash_again(server, api, run, times=1)
    assert run in hopeless(server.api_url)
    said: list[str] = []
    deadline = time.monotonic() + 60
    while not said and time.monotonic() < deadline:  # a busy server is asked at the next look
        look_for_crashed(server.api_url, now=time.time(), log=said.append)
    assert said == [f"run {run}: crashed {MOST_CRASHES} times before it began; given up"]
    found = api.get(f"/flow_runs/{run}")
    assert (found["tags"], found["state"]["name"]) == (["mine"], "Crashed")
    assert run not in hopeless(server.api_url)


def test_a_run_that_has_begun_counts_its_starts_itself(
    server: Server, automation: Any, api: PrefectApi, crashed: Callable[..., str]
) -> None:
    run = crashed()
    resume(server, run)
    for kind in ("pending", "running"):
        api.set_state(run, kind)
    crash_again(server, api, run, times=MOST_CRASHES)
    assert run not in hopeless(server.api_url)


def test_without_a_server_nothing_is_raised() -> None:
    look_for_crashed("http://127.0.0.1:9/api", now=time.time(), log=print)
