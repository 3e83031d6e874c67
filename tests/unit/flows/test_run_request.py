"""A run's parameters are declared once, and forms, options and records are made of them."""

from typing import Any

import pytest

from flows.artifacts.runs import Run, new_run
from flows.building.stage_request import StageRequest
from flows.evals.suite import EvalRequest
from flows.run_request import RunRequest, options_of, request_of, shared
from flows.sweep.request import SweepRequest
from infra.placement import check_pool_name
from nanochat_core.errors import ConfigError

# The names are an interface: stored deployments, schedules and API clients have them.
NAMES = {
    RunRequest: "profile depth overrides from_stage until force use run_name store gpus place "
    "nodes pool retries strict",
    SweepRequest: "profile depth overrides vary seeds stage reduction run_name store gpus place "
    "nodes pool retries strict",
    EvalRequest: "model profile overrides metric drop against store gpus place pool retries strict",
}


@pytest.mark.parametrize("request_type", NAMES, ids=lambda kind: kind.__name__)
def test_names_that_stored_deployments_use_stay(request_type):
    assert set(NAMES[request_type].split()) <= set(options_of(request_type))


def test_a_form_begins_with_what_is_used_most_and_lists_end_a_group():
    names = list(options_of(RunRequest))
    assert names[:5] == ["profile", "depth", "steps", "data", "overrides"]
    assert set(names[5:9]) == {"until", "from_stage", "force", "use"}
    assert {"gpus", "pool", "nodes", "store", "place"} == set(names[9:14])
    assert names[13] == "place"
    assert next(iter(options_of(EvalRequest))) == "model"


def test_a_text_of_a_form_fits_its_line_and_does_not_say_that_a_field_is_optional():
    for kind in (RunRequest, EvalRequest, SweepRequest):
        for name, (_, option) in options_of(kind).items():
            assert len(option.help) <= 110, name
            assert "ptional" not in option.label + option.help, name


def test_short_fields_stand_for_settings():
    request = RunRequest(overrides=("seed=7",), steps=9, data="/data/letters")
    text = ("shards.path=/data/letters", "shards.source=local")
    expected = RunRequest(overrides=("seed=7", "pretrain.num_steps=9", *text))
    assert request.resolved == expected == expected.resolved
    text = ("shards.path=owner/name/train-*", "shards.source=hub")
    assert RunRequest(data="hf://owner/name/train-*").resolved.overrides == text


def test_a_setting_that_is_given_twice_is_refused():
    with pytest.raises(ConfigError, match=r"pretrain.num_steps is set twice: to 9 by") as error:
        _ = RunRequest(overrides=("pretrain.num_steps = 8",), steps=9).resolved
    assert error.value.hint


def test_a_record_and_a_stage_request_have_what_the_run_was_asked_for():
    asked: dict[str, Any] = {"profile": "d12", "depth": 4, "overrides": ("seed=7",), "gpus": 0}
    asked |= {"place": ("threads=1",), "until": "sft"}
    request = RunRequest(**asked)
    run = new_run("mine-1", "mine", request)
    assert shared(Run, request) == asked
    del asked["until"]
    assert shared(StageRequest, run) == {**asked, "run": "mine-1"}


def test_none_asks_for_no_pool_where_a_deployment_names_one():
    assert request_of(RunRequest, {"pool": "none"}).pool is None
    assert request_of(RunRequest, {"pool": "gpu"}).pool == "gpu"
    with pytest.raises(ConfigError, match="cannot be the name"):
        check_pool_name("none")
