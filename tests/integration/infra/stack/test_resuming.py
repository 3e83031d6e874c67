"""Crashed runs that were overlooked are resumed, once, and only while the automation is on."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from deployments.automations import resume_crashed
from infra.prefect.records import Server
from infra.prefect.supervisor.runs import (
    AUTO_RESUME,
    AUTOMATION,
    SECONDS_OF_AUTOMATION,
    look_for_crashed,
)
from tests.support.deployments.prefect_api import PrefectApi
from tests.support.prefect_login import retry_if_busy

pytestmark = pytest.mark.prefect
LATER = SECONDS_OF_AUTOMATION + 5


def look(server: Server, run: str, *, after: float = 0.0) -> list[str]:
    """The lines about a run that are logged at a look, so many seconds from now."""
    lines: list[str] = []
    retry_if_busy(
        lambda: look_for_crashed(server.api_url, now=time.time() + after, log=lines.append)
    )
    return [line.removeprefix(f"run {run}: ") for line in lines if run in line]


RESUMED = ["resumed, its crash was overlooked"]


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


def test_a_run_that_crashed_a_while_ago_is_resumed_once(
    server: Server, automation: Any, api: PrefectApi, crashed: Callable[..., str]
) -> None:
    run, unwanted = crashed(), crashed(tags=())
    assert look(server, run) == look(server, run, after=2 * 3600) == []
    assert look(server, run, after=LATER) == RESUMED
    assert api.state(run)["name"] == "AwaitingRetry"
    assert look(server, run, after=LATER) == []
    assert api.state(unwanted)["name"] == "Crashed"


def test_with_the_automation_off_nothing_is_resumed(
    server: Server, automation: Any, crashed: Callable[..., str]
) -> None:
    from prefect.client.orchestration import get_client

    run = crashed()
    with get_client(sync_client=True) as client:
        client.pause_automation(automation.id)
    assert look(server, run, after=LATER) == []
