"""What Prefect does by itself, on a real server: runs that only the API knows, and their events.

A run whose process died is nothing else to the server than one of which it hears no more.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.deployments.prefect_api import PrefectApi
from tests.support.flows.pools import wait_until

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
        # Runs of other tests fail as well.
        [(content_type, body)] = wait_until(lambda: [b for b in bodies if name in b[1]["text"]])
        assert content_type == "application/json"
        reason = 'it said "no" {{ twice }}\nhint: \\ again'
        assert body == {"text": f"nanochat failed: {name}: {reason}"}
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
