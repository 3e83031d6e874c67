"""Times of builds are compared where the work is of one kind, in proportion to its amount."""

import dataclasses

import pytest

from flows.identity.work import measure_work
from flows.profiles import open_profile
from flows.stages import PRETRAIN, REPORT, RL, SFT, SHARDS, TOKENIZER, stage_named
from nanochat_core import scaling

TINY = open_profile("tiny").run
LARGE = scaling.run_for_depth(4)


def change(section: str, **values: object):
    return dataclasses.replace(
        TINY, **{section: dataclasses.replace(getattr(TINY, section), **values)}
    )


@pytest.mark.parametrize("stage", [*REPORT.inputs, REPORT], ids=lambda stage: stage.name)
def test_a_model_twice_as_large_or_another_seed_is_of_the_same_kind(stage):
    whole = measure_work(stage, TINY)
    assert measure_work(stage, dataclasses.replace(TINY, seed=7)) == whole
    larger = measure_work(stage, open_profile("tiny", depth=6).run)
    assert larger.kind == whole.kind
    assert larger.amount == whole.amount if stage.compute == "cpu" else larger.amount > whole.amount


@pytest.mark.parametrize(
    ("stage", "section", "values", "times"),
    [
        ("pretrain", "pretrain", {"num_steps": 2 * TINY.pretrain.num_steps}, 2),
        ("sft", "sft", {"num_epochs": 3}, 3),
        ("rl", "rl", {"num_steps": 2 * TINY.rl.num_steps}, 2),
        ("chat_eval_rl", "rl", {"num_steps": 6}, 1),
        ("report", "rl", {"num_steps": 6}, 1),
    ],
)
def test_the_amount_follows_the_settings(stage, section, values, times):
    before = measure_work(stage_named(stage), TINY)
    after = measure_work(stage_named(stage), change(section, **values))
    assert (after.kind, after.amount) == (before.kind, pytest.approx(before.amount * times))


def test_shards_of_the_hub_count_and_any_other_text_is_of_its_own_kind():
    shards = measure_work(SHARDS, LARGE)
    assert shards.amount == LARGE.shards.num_shards * scaling.CHARS_PER_SHARD
    more = dataclasses.replace(LARGE.shards, num_shards=2 * LARGE.shards.num_shards)
    twice = measure_work(SHARDS, dataclasses.replace(LARGE, shards=more))
    assert (twice.kind, twice.amount) == (shards.kind, 2 * shards.amount)
    # A tokenizer reads no more than its limit.
    assert measure_work(TOKENIZER, dataclasses.replace(LARGE, shards=more)).amount == min(
        twice.amount, LARGE.tokenizer.max_chars
    )
    folders = [change("shards", source="local", path=path) for path in ("/a", "/b")]
    kinds = {measure_work(SHARDS, run).kind for run in (TINY, LARGE, *folders)}
    assert len(kinds) == 4


def test_other_text_at_the_same_place_is_of_another_kind():
    runs = [change("shards", source="local", path="/a", snapshot=(text,)) for text in "ab"]
    for stage in (SHARDS, TOKENIZER):
        assert len({measure_work(stage, run).kind for run in runs}) == 2


def test_precision_and_evaluations_are_of_their_own_kind():
    half = change("numerics", precision="bf16")
    few = change("chat_eval", tasks=TINY.chat_eval.tasks[:1])
    assert measure_work(PRETRAIN, half).kind != measure_work(PRETRAIN, TINY).kind
    evaluation = stage_named("chat_eval_rl")
    kinds = {measure_work(evaluation, run).kind for run in (TINY, half, few)}
    assert len(kinds) == 3


def test_all_examples_of_a_file_are_of_the_kind_of_the_file():
    entries = tuple(dataclasses.replace(entry, num_examples=None) for entry in TINY.sft.mixture)
    whole = change("sft", mixture=entries)
    assert measure_work(SFT, whole).kind != measure_work(SFT, TINY).kind
    first, *rest = TINY.task_data.datasets
    other = dataclasses.replace(first, snapshot="0" * 64)
    data = dataclasses.replace(TINY.task_data, datasets=(other, *rest))
    changed = dataclasses.replace(whole, task_data=data)
    assert measure_work(SFT, changed).kind != measure_work(SFT, whole).kind
    assert measure_work(SFT, dataclasses.replace(TINY, task_data=data)) == measure_work(SFT, TINY)


def test_a_stage_without_a_measure_compares_with_the_same_settings_alone():
    dpo = dataclasses.replace(RL, name="dpo")
    assert measure_work(dpo, change("pretrain", num_steps=1)) == measure_work(dpo, TINY)
    assert measure_work(dpo, change("rl", num_steps=1)).kind != measure_work(dpo, TINY).kind
    assert measure_work(PRETRAIN, TINY).kind == '["fp32"]'
