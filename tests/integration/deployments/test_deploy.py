"""Registering everything: nothing twice, nothing of a person's undone, nothing old left."""

import os
from typing import Any
from unittest import mock

import pytest

from nanochat_core.errors import ConfigError
from tests.support.flows.terminal import Terminal

pytestmark = pytest.mark.prefect

DEPLOYMENTS = (
    "nanochat/nanochat",
    "one-stage/gpu",
    "sweep/sweep",
    "nanochat-eval/main",
)


def test_all_of_it_is_registered_and_a_second_time_changes_nothing(deploy, api):
    def registered() -> Any:
        deployments = [api.deployment(name) for name in DEPLOYMENTS]
        return deployments, api.automations(), api.get("/work_pools/gpu")

    before = registered()
    again = deploy()
    assert (again.changed, again.removed) == ((), ())
    assert registered() == before
    assert set(again.deployments) == set(DEPLOYMENTS)


@pytest.mark.parametrize(
    ("name", "pool", "queue", "tags"),
    [
        ("nanochat/nanochat", "cpu", "default", ["auto-resume"]),
        ("one-stage/gpu", "gpu", "train", []),
        ("sweep/sweep", "cpu", "default", ["auto-resume"]),
        ("nanochat-eval/main", "cpu", "default", ["nanochat-eval", "auto-resume"]),
    ],
)
def test_a_deployment_says_where_it_runs_and_whether_it_resumes(
    deploy, api, name, pool, queue, tags
):
    found = api.deployment(name)
    assert (found["work_pool_name"], found["work_queue_name"]) == (pool, queue)
    assert found["tags"] == tags
    assert found["description"].endswith(".")
    assert found["enforce_parameter_schema"]
    module, _, function = found["entrypoint"].rpartition(".")
    assert (module.split(".")[0], function) == ("flows", name.split("/")[0].replace("-", "_"))


def test_training_goes_first_and_runs_say_three_times_that_they_live_before_they_are_given_up(
    deploy, api
):
    from infra.prefect.supervisor.runs import SILENT_SECONDS

    queues = {q["name"]: q["priority"] for q in api.post("/work_pools/gpu/queues/filter")}
    assert queues["train"] == 1 < queues["eval"]
    for pool in ("cpu", "gpu"):
        template = api.get(f"/work_pools/{pool}")["base_job_template"]
        env = template["variables"]["properties"]["env"]["default"]
        assert 3 * int(env["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) == SILENT_SECONDS == 90


def test_what_a_person_set_stays(deploy, api):
    pool = api.get("/work_pools/gpu")["base_job_template"]
    pool["variables"]["properties"]["env"]["default"]["HTTPS_PROXY"] = "http://proxy:3128"
    api.patch("/work_pools/gpu", {"concurrency_limit": 3, "base_job_template": pool})
    api.patch("/work_pools/gpu/queues/eval", {"concurrency_limit": 1})
    nightly = api.deployment("nanochat-eval/main")
    [schedule] = nightly["schedules"]
    assert nightly["paused"], "the nightly evaluation costs nothing until somebody wants it"
    cron = {"cron": "30 4 * * *", "timezone": "Europe/Berlin"}
    api.patch(f"/deployments/{nightly['id']}", {"paused": False, "tags": ["mine"]})
    api.patch(f"/deployments/{nightly['id']}/schedules/{schedule['id']}", {"schedule": cron})
    full = api.deployment("nanochat/nanochat")
    api.patch(
        f"/deployments/{full['id']}",
        {"parameters": {"profile": "d12"}, "concurrency_limit": 2, "work_pool_name": "gpu"},
    )
    sweep = api.deployment("sweep/sweep")
    api.patch(f"/deployments/{sweep['id']}", {"parameters": {"pool": None}})
    try:
        deploy()
        assert deploy().changed == ()
        assert api.deployment("sweep/sweep")["parameters"] == {"pool": None}
        found = api.get("/work_pools/gpu")
        assert found["concurrency_limit"] == 3
        env = found["base_job_template"]["variables"]["properties"]["env"]["default"]
        assert env["HTTPS_PROXY"] == "http://proxy:3128"
        assert api.get("/work_pools/gpu/queues/eval")["concurrency_limit"] == 1
        nightly = api.deployment("nanochat-eval/main")
        assert (nightly["paused"], nightly["parameters"]["model"]) == (False, "main")
        assert set(nightly["tags"]) == {"mine", "nanochat-eval", "auto-resume"}
        [schedule] = nightly["schedules"]
        assert schedule["schedule"]["cron"] == "30 4 * * *"
        assert schedule["schedule"]["timezone"] == "Europe/Berlin"
        full = api.deployment("nanochat/nanochat")
        assert full["parameters"] == {"profile": "d12", "pool": "gpu"}
        assert full["global_concurrency_limit"]["limit"] == 2
        assert full["work_pool_name"] == "gpu"
    finally:
        for name in ("nanochat-eval/main", "nanochat/nanochat", "sweep/sweep"):
            api.delete(f"/deployments/{api.deployment(name)['id']}")
        api.patch("/work_pools/gpu", {"concurrency_limit": None})
        deploy()


def test_what_is_out_of_date_is_repaired(deploy, api):
    found = api.deployment("nanochat/nanochat")
    fresh = {key: found[key] for key in ("entrypoint", "description", "parameter_openapi_schema")}
    api.patch(
        f"/deployments/{found['id']}",
        {
            "entrypoint": "flows.old.nanochat",
            "description": "Old.",
            "enforce_parameter_schema": False,
            "parameter_openapi_schema": {"type": "object", "properties": {"old": {}}},
            "parameters": {"old": 1, "depth": 200, "profile": "d12"},
        },
    )

    assert deploy().changed == ("nanochat/nanochat",)
    found = api.deployment("nanochat/nanochat")
    assert {key: found[key] for key in fresh} == fresh
    assert found["parameters"] == {"profile": "d12", "pool": "gpu"}  # what is no value is gone
    assert found["enforce_parameter_schema"]
    assert deploy().changed == ()
    api.delete(f"/deployments/{found['id']}")
    deploy()


def test_the_schedule_of_another_model_follows_the_code_and_keeps_its_own_settings(deploy, api):
    from deployments.evals import apply, evaluation, schedule_of

    deploy()
    when = schedule_of("0 4 * * *")
    apply(evaluation({"model": "sft@other"}, schedule=when, paused=False, environment={"A": "b"}))
    found = api.deployment("nanochat-eval/sft-other")
    api.patch(f"/deployments/{found['id']}", {"entrypoint": "flows.old.nanochat_eval"})
    assert deploy().changed == ("nanochat-eval/sft-other",)
    now = api.deployment("nanochat-eval/sft-other")
    assert now["entrypoint"] == found["entrypoint"]
    kept = ("paused", "parameters", "job_variables")
    assert {name: now[name] for name in kept} == {name: found[name] for name in kept}
    assert now["schedules"][0]["schedule"]["cron"] == "0 4 * * *"
    assert deploy().changed == ()
    api.delete(f"/deployments/{found['id']}")


def test_a_model_that_a_person_typed_into_the_form_adds_no_deployment_and_is_not_replaced(
    deploy, api
):
    from deployments.evals import apply, evaluation, read_evaluations, remove, schedule_of

    deploy()
    main = evaluation({"model": "main"}, schedule=schedule_of())
    found = api.deployment("nanochat-eval/main")
    api.patch(f"/deployments/{found['id']}", {"parameters": {"model": "sft@main"}})
    assert "nanochat-eval/sft-main" not in deploy().changed
    found_now = [(item.parameters["model"], item.name) for item in read_evaluations()]
    assert found_now == [("sft@main", "main")]
    for refused in (lambda: apply(main), lambda: remove("main")):
        with pytest.raises(ConfigError, match="nanochat-eval/main evaluates sft@main, not main"):
            refused()
    api.delete(f"/deployments/{found['id']}")
    deploy()


def test_what_an_older_version_registered_is_removed_and_nothing_of_anybody_else(deploy, api):
    flow = api.deployment("nanochat/nanochat")["flow_id"]
    old = {"name": "old", "flow_id": flow, "version": "nanochat-flows 0.0.1"}
    ours = api.post("/deployments/", old)["id"]
    theirs = api.post("/deployments/", {"name": "theirs", "flow_id": flow})["id"]
    body = {
        "trigger": {"type": "event", "posture": "Reactive", "expect": ["a"], "within": 0},
        "actions": [{"type": "do-nothing"}],
    }
    api.post("/automations/", {**body, "name": "nanochat-old", "tags": ["nanochat-flows"]})
    api.post("/automations/", {**body, "name": "nanochat-crash-mine"})

    assert set(deploy().removed) == {"nanochat/old", "nanochat-old"}
    assert api.send("GET", f"/deployments/{ours}").status_code == 404
    assert api.get(f"/deployments/{theirs}")
    assert "nanochat-crash-mine" in api.automations()
    api.delete(f"/deployments/{theirs}")
    api.delete(f"/automations/{api.automations()['nanochat-crash-mine']['id']}")


def test_a_pool_of_another_type_is_used_as_it_is(server, api):
    from prefect.client.orchestration import get_client

    from deployments.pools import Pool, ensure_pool

    env = {"type": "object", "default": {"A": "b"}}
    image = {"type": "string", "default": "ours:1"}
    for name, variables in (("k8s", {"env": env, "image": image}), ("bare", {"image": image})):
        template = {
            "job_configuration": {variable: f"{{{{ {variable} }}}}" for variable in variables},
            "variables": {"type": "object", "properties": variables},
        }
        api.post(
            "/work_pools/", {"name": name, "type": "kubernetes", "base_job_template": template}
        )
        pool = Pool(name=name, description="", queues={"train": 1})
        with get_client(sync_client=True) as client:
            assert ensure_pool(client, pool)
            assert not ensure_pool(client, pool)
        found = api.get(f"/work_pools/{name}")
        assert found["type"] == "kubernetes"
        properties = found["base_job_template"]["variables"]["properties"]
        assert properties["image"] == image
        if name == "k8s":
            given = {"A": "b", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
            assert properties["env"]["default"] == given


def test_another_pool_of_gpus_is_known_from_then_on(deploy, api):
    assert "one-stage/h100" in deploy(pools=["h100"]).changed
    again = deploy()
    assert (again.changed, again.removed) == ((), ())
    assert again.pools == ("cpu", "gpu", "h100")
    found = api.deployment("one-stage/h100")
    assert (found["work_pool_name"], found["work_queue_name"]) == ("h100", "train")
    api.delete(f"/deployments/{found['id']}")
    api.delete("/work_pools/h100")
    assert deploy().pools == ("cpu", "gpu")


def test_the_command_registers_and_a_second_time_says_that_nothing_changed(
    deploy, server, capsys, transcript, tmp_path
):
    terminal = Terminal(capsys, transcript)
    here = {"PREFECT_API_URL": server.api_url, "NANOCHAT_HOME": str(tmp_path)}
    with mock.patch.dict(os.environ, here):
        lines = terminal.said("up", "--register", "--home", str(tmp_path))
        os.environ["NANOCHAT_WEBHOOK"] = "chat"
        assert terminal.fails("up", "--register")[0] == "the webhook is not an address"
    assert lines[0] == "work pools   cpu, gpu"
    assert all(name in lines[1] for name in DEPLOYMENTS)
    assert "changed      nothing" in lines
    up = f"PREFECT_API_URL={server.api_url} nanochat up --home {tmp_path}"
    assert lines[-1] == f"next         {up}, on each machine that works"
