"""Alerts on a real server, about runs that only the API knows."""

import json

import pytest

from tests.support.flows.pools import wait_until

pytestmark = pytest.mark.prefect


def test_each_alert_says_in_a_sentence_what_it_does_and_without_an_address_there_is_none(
    deploy, api, posted
):
    assert not [name for name in api.automations() if name.startswith("nanochat-")]
    deploy(webhook=posted[0])
    ours = [a for name, a in api.automations().items() if name.startswith("nanochat-")]
    assert len(ours) == 3
    for automation in ours:
        assert automation["description"].endswith("."), automation["name"]
        assert ". " not in automation["description"], automation["name"]
        assert automation["enabled"]
    shown = json.dumps([ours, api.post("/block_documents/filter", {"limit": 200})])
    assert posted[0] not in shown, "an address to which any client may post is secret"
    assert "nanochat-webhook" in shown


def test_an_alert_follows_the_code_and_stays_switched_off(deploy, api, posted):
    deploy(webhook=posted[0])
    alert = api.automations()["nanochat-pool-not-ready"]
    body = {key: alert[key] for key in ("name", "description", "actions", "tags")}
    body |= {"trigger": {**alert["trigger"], "threshold": 7}, "enabled": False}
    api.put(f"/automations/{alert['id']}", body)
    assert deploy(webhook=posted[0]).changed == ("nanochat-pool-not-ready",)
    found = api.automations()["nanochat-pool-not-ready"]
    assert (found["trigger"]["threshold"], found["enabled"]) == (1, False)
    api.post("/automations/", body)  # two processes that create one at once make two
    assert deploy(webhook=posted[0]).changed == ("nanochat-pool-not-ready",)
    assert deploy(webhook=posted[0]).changed == ()


def test_the_flows_that_are_deployed_are_those_whose_runs_are_resumed(deploy):
    from infra.prefect.supervisor.runs import FLOWS

    assert {name.partition("/")[0] for name in deploy().deployments} == set(FLOWS)


def test_a_failed_run_is_posted_with_its_reason_whatever_is_in_it(deploy, api, posted):
    url, bodies = posted
    assert set(deploy(webhook=url).changed) == {
        "nanochat-run-failed",
        "nanochat-pool-not-ready",
        "nanochat-eval-regressed",
    }
    assert deploy(webhook=url).changed == ()
    assert deploy().removed == ()  # without the address those that post stay
    run = api.start(api.deployment("nanochat/nanochat")).json()["id"]
    api.set_state(run, "running")
    name = api.run(run)["name"]
    api.set_state(run, "failed", 'it said "no" {{ twice }}\nhint: \\ again')
    # Runs of other tests fail as well.
    [(content_type, body)] = wait_until(lambda: [b for b in bodies if name in b[1]["text"]])
    assert content_type == "application/json"
    reason = 'it said "no" {{ twice }}\nhint: \\ again'
    assert body == {"text": f"nanochat failed: {name}: {reason}"}
