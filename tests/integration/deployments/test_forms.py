"""What a form shows and what it takes, through the API that the form itself uses."""

from typing import Any

import pytest

from flows.identity.ref import name_in
from flows.overrides import default_name
from flows.profiles import PROFILES
from flows.run_request import RunRequest
from flows.stages import STAGES

STAGE_NAMES = [stage.name for stage in STAGES]
# The paths of the flows, and the fields that their forms begin with.
FORMS = {
    "flows.orchestration.pipeline.nanochat": "profile depth run_name overrides steps data",
    "flows.evals.flow.nanochat_eval": "model profile overrides metric",
    "flows.sweep.build.sweep": "profile depth run_name vary seeds overrides",
}
FLOWS = ("nanochat/nanochat", "nanochat-eval/main", "sweep/sweep")

# By deployment and field.
WRONG = {
    "nanochat/nanochat": {
        "profile": ["tinny"],
        "depth": [0, 101, "four", 4.5],
        "overrides": ["seed=7", ["pretrain.num_steps 100"], ["=7"]],
        "from_stage": ["pretrian"],
        "force": [["pretrian"], ["sft", "sft"]],
        "use": [["pretrain@"], ["report@main"], ["sft/xyz"]],
        "run_name": ["a b", "../up", "x" * 101],
        "store": ["/data/store", "http://bucket"],
        "gpus": [-1, 65],
        "nodes": [0, 65],
        "pool": ["a/b", "", "cpu"],
        "retries": [-1, 101],
        "place": [["device_batch=8"], ["device_batch_size"]],
        "strict": ["yes"],
    },
    "nanochat-eval/main": {
        "model": ["a b"],
        "profile": ["tinny"],
        "drop": [-0.1],
        "against": ["worst"],
        "metric": ["?"],
    },
}
RIGHT = [
    {},
    {"profile": "d12", "depth": 1, "gpus": 0, "nodes": 64, "retries": 0, "strict": True},
    {"depth": None, "run_name": None, "store": None, "gpus": None, "pool": None},
    {"overrides": ["seed=7", "chat_eval.prompts=['a=b']", "shards.path=/my text"]},
    {"from_stage": "sft", "force": STAGE_NAMES},
    {"use": ["main", "pretrain@main", "chat_eval_sft/1a2b", "tiny-20261121t030000z-ab12"]},
    {"run_name": "mine_2.b", "store": "s3://bucket/prefix", "pool": "h100 x8".replace(" ", "-")},
    {"pool": "cpu-and-gpu"},
    {"store": "file:///data", "place": ["device_batch_size=8", "sinks=wandb,trackio"]},
]


def form_of(path: str) -> dict[str, Any]:
    """The fields of a flow's form, without a server."""
    import importlib

    from deployments.registry import Wanted

    module, _, name = path.rpartition(".")
    flow = getattr(importlib.import_module(module), name)
    return Wanted(flow=flow, name="x", pool="cpu", description="").form["properties"]


@pytest.mark.parametrize("path", FORMS)
def test_every_field_has_a_title_a_description_one_type_and_rules_beyond_it(path):
    limits = {"enum", "pattern", "minimum", "maximum", "items"}
    for name, rules in form_of(path).items():
        assert rules["title"] != name, name  # that of a person, not of the code
        assert rules["title"][0].isupper(), name
        assert rules["description"].endswith("."), name
        assert "anyOf" not in rules, name  # would be tabs in the form
        assert rules["type"] in ("string", "integer", "number", "boolean", "array"), name
        assert rules["type"] == "boolean" or limits & set(rules), name
        assert rules.get("default", "absent") is not None, name


@pytest.mark.parametrize(("path", "first"), FORMS.items())
def test_a_form_begins_with_what_most_people_fill_in(path, first):
    form = form_of(path)
    # Prefect shows the fields by their position, which is that of the flow's parameters.
    names = sorted(form, key=lambda name: form[name]["position"])
    assert names[: len(first.split())] == first.split()


def test_profiles_and_stages_are_chosen_from_those_there_are() -> None:
    form = form_of("flows.orchestration.pipeline.nanochat")
    assert form["profile"]["enum"] == list(PROFILES)
    assert form["profile"]["default"] == "tiny"
    assert form["from_stage"]["enum"] == STAGE_NAMES
    assert form["force"]["items"]["enum"] == STAGE_NAMES
    assert form["force"]["uniqueItems"]
    assert (form["depth"]["minimum"], form["depth"]["maximum"]) == (1, 100)


def test_a_caller_in_python_gives_tuples_and_is_not_held_to_the_form() -> None:
    from flows.orchestration.pipeline import nanochat

    given = {"overrides": ("seed=7",), "force": ("sft",), "run_name": None, "depth": 1000}
    assert nanochat.validate_parameters(given).items() >= given.items()


@pytest.mark.prefect
@pytest.mark.parametrize(
    ("deployment", "name"), [(flow, name) for flow, fields in WRONG.items() for name in fields]
)
def test_a_wrong_value_is_refused_and_the_field_named(deploy, api, deployment, name):
    for value in WRONG[deployment][name]:
        answer = api.start(api.deployment(deployment), **{name: value})
        assert (answer.status_code, value) == (409, value)
        assert f"field '{name}" in answer.json()["detail"]


@pytest.mark.prefect
@pytest.mark.parametrize("parameters", RIGHT, ids=[" ".join(p) or "nothing" for p in RIGHT])
def test_right_values_are_taken(deploy, api, parameters):
    answer = api.start(api.deployment("nanochat/nanochat"), **parameters)
    assert answer.status_code == 201, answer.text
    run = answer.json()
    assert run["parameters"] == {"pool": "gpu"} | parameters
    assert "auto-resume" in run["tags"]
    api.delete(f"/flow_runs/{run['id']}")


@pytest.mark.prefect
def test_a_parameter_that_there_is_not_is_refused(deploy, api):
    for deployment in FLOWS:
        answer = api.start(api.deployment(deployment), layers=4)
        assert answer.status_code == 409
        assert "'layers'" in answer.json()["detail"]


@pytest.mark.prefect
@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"overrides": ("pretrain.num_step=1",)}, "there is no setting 'pretrain.num_step'"),
        ({"place": ("device_batch_size=0",)}, "device_batch_size is 0"),
        ({"use": ("pretrain@unknown",)}, "there is no pretrain@unknown"),
        ({"store": "ftp://x"}, "unsupported store URL 'ftp://x'"),
    ],
    ids=str,
)
def test_what_no_schema_can_say_fails_the_run_at_once_in_one_line(
    server, tmp_path, monkeypatch, parameters, error
):
    from flows.orchestration.pipeline import nanochat

    monkeypatch.setenv("NANOCHAT_HOME", str(tmp_path))
    monkeypatch.delenv("NANOCHAT_STORE", raising=False)
    state: Any = nanochat(**parameters, return_state=True)
    assert state.is_failed()
    assert not state.is_crashed()
    assert state.name == "Failed"
    assert error in state.message
    lines = state.message.splitlines()
    assert [line.startswith("hint: ") for line in lines] == [False, True][: len(lines)]
    assert not (tmp_path / "work").exists()


@pytest.mark.prefect
def test_a_run_without_a_name_is_named_by_its_settings(server, tmp_path, monkeypatch):
    from prefect.client.orchestration import get_client

    from flows.orchestration.pipeline import nanochat

    monkeypatch.setenv("NANOCHAT_HOME", str(tmp_path))
    monkeypatch.delenv("NANOCHAT_STORE", raising=False)
    asked: dict[str, Any] = {"overrides": ("seed=7",), "use": ("pretrain@unknown",)}
    state: Any = nanochat(steps=9, **asked, return_state=True)
    with get_client(sync_client=True) as client:
        name = client.read_flow_run(state.state_details.flow_run_id).name
    settings = ("pretrain.num_steps=9", "seed=7")
    assert name_in(name) == default_name(RunRequest(overrides=settings, use=asked["use"]))
