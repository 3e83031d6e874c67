"""A run to which artifacts are given builds what comes after them, not what only they need."""

import pytest

from flows.plan.pinned import check_trained, open_pinned, stages_before, stages_with
from flows.stages import CHAT_MODELS, REPORT, STAGES, stage_named, stages_to_redo
from nanochat_core.errors import ConfigError
from tests.support.flows.shelf import make_manifest, put_artifact

NAMES = [stage.name for stage in STAGES if stage is not REPORT]


def names_with(*given: str, until: str | None = None) -> list[str]:
    pinned = {name: make_manifest(name) for name in given}
    return [stage.name for stage in stages_with(pinned, until=until)]


def from_stage(name: str) -> list[str]:
    later = stages_to_redo(STAGES, force=(), from_stage=name)
    return [name for name in NAMES if name in later]


def test_nothing_given_is_the_whole_table():
    assert stages_with({}) == STAGES


def test_a_given_chat_model_is_trained_on_without_its_past():
    for model in CHAT_MODELS:
        assert names_with(model.name) == ["task_data", *from_stage(model.name)]


def test_a_given_base_model_still_needs_rows_to_be_evaluated_on():
    kept = names_with("pretrain")
    assert "report" not in kept
    assert kept[:6] == ["shards", "task_data", "tokenizer", "tokens", "rows", "pretrain"]
    assert "shards" in names_with("pretrain", "tokenizer")  # base_eval's rows are made anew
    assert names_with("pretrain", "rows")[:3] == ["task_data", "rows", "pretrain"]


def test_what_a_given_model_was_made_from_is_not_built():
    after_sft = ["task_data", *from_stage("sft")]
    assert names_with("sft", "tokenizer") == [after_sft[0], "tokenizer", *after_sft[1:]]
    assert names_with("sft", "task_data") == after_sft
    assert names_with("sft", "shards") == ["shards", *after_sft]
    assert names_with("sft", "pretrain") == ["task_data", "pretrain", *after_sft[1:]]
    assert "midtrain" not in names_with("pretrain", "tokenizer", "sft")


@pytest.mark.parametrize("until", [stage.name for stage in STAGES])
def test_a_last_stage_is_built_with_what_it_needs(until):
    needed = {until, *stages_before(stage_named(until))}
    assert names_with(until=until) == [stage.name for stage in STAGES if stage.name in needed]


def test_a_model_is_given_to_the_stage_that_evaluates_it():
    assert names_with("sft", until="chat_eval_sft") == ["task_data", "sft", "chat_eval_sft"]
    kept = names_with("pretrain", "rows", "task_data", until="base_eval")
    assert kept == ["task_data", "rows", "pretrain", "base_eval"]


@pytest.mark.parametrize(
    ("given", "until", "error"),
    [
        ("sft", "tokenizer", "a run until tokenizer does not need sft/"),
        ("sft", "sft", "a run until sft does not need sft/"),
        ("sft", "report", "with --use a run has no report"),
        ("sft", "stf", "there is no stage 'stf'"),
    ],
)
def test_artifacts_that_the_last_stage_does_not_need_are_refused(given, until, error):
    with pytest.raises(ConfigError, match=error) as caught:
        names_with(given, until=until)
    assert caught.value.hint


def test_a_model_of_a_middle_era_is_evaluated_and_not_trained():
    given = {"sft": make_manifest("sft", metrics={"era": "2026-03-09"})}
    check_trained(stages_with(given, until="chat_eval_sft"), given)
    for until in (None, "rl"):
        error = "rl cannot train sft/.*, a model of nanochat's era 2026-03-09"
        with pytest.raises(ConfigError, match=error) as caught:
            check_trained(stages_with(given, until=until), given)
        assert "--until chat_eval_sft" in (caught.value.hint or "")


def test_two_artifacts_of_one_stage_are_refused_and_a_report(store):
    sfts = [put_artifact(store, make_manifest("sft", config={"seed": seed})) for seed in (1, 2)]
    report = put_artifact(store, make_manifest("report"))
    assert open_pinned(store, [sfts[0].name], warn=print) == {"sft": sfts[0]}
    for given, error in ((sfts, "two artifacts are given for sft"), ([report], "is a report")):
        with pytest.raises(ConfigError, match=error):
            open_pinned(store, [manifest.name for manifest in given], warn=print)


def test_the_plan_shows_what_is_given_and_leaves_out_what_is_not_needed(full_house):
    base = make_manifest("midtrain", config={"elsewhere": True})
    plan = full_house.plan(pinned={"midtrain": base})
    assert [item.stage.name for item in plan.stages] == names_with("midtrain")
    item = plan.of("midtrain")
    assert (item.state, item.reason, item.fingerprint) == ("=", "given", base.fingerprint)
    assert plan.of("task_data").state == "="
    assert plan.of("sft").state == "~"  # it was made from another model
    assert plan.of("rl").state == "?"
    with pytest.raises(ConfigError, match="stage pretrain is not part of this run"):
        plan.of("pretrain")


@pytest.mark.parametrize(
    ("stage", "message"),
    [("midtrain", "its artifact is given"), ("pretrain", "nothing in this run needs it")],
)
def test_what_is_not_built_cannot_be_redone(full_house, stage, message):
    given = {"midtrain": make_manifest("midtrain")}
    with pytest.raises(ConfigError, match=message):
        full_house.plan(pinned=given, from_stage=stage)
    with pytest.raises(ConfigError, match=message):
        full_house.plan(pinned=given, force=frozenset({stage}))
