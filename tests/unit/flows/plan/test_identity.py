"""What changes a stage's identity in the plan, and what does not."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from flows.identity.fingerprint import canonical_config, canonical_json
from flows.stages import SFT, STAGES
from nanochat_core import config, scaling
from nanochat_core.config import DatasetConfig, RunConfig
from nanochat_core.section import Section
from tests.support.flows.house import RUN, after, on_gpus, states, without

# A change in each section of the configuration.
CHANGES: dict[str, dict[str, Any]] = {
    "numerics": {"softcap": 9.0},
    "model": {"width": 2 * RUN.model.width},
    "shards": {"num_shards": 9},
    "task_data": {"core_bundle_sha256": "0" * 64},
    "tokenizer": {"max_chars": 9},
    "rows": {"buffer_documents": 9},
    "optimizer": {"muon_lr": 9.0},
    "pretrain": {"num_steps": 9},
    "base_eval": {"max_new_tokens": 9},
    "midtrain": {"num_epochs": 9},
    "sft": {"mixture": RUN.sft.mixture[:-1]},
    "rl": {"num_steps": 9},
    "chat_eval": {"tasks": RUN.chat_eval.tasks[:-1]},
}
SECTIONS = {field.name for field in dataclasses.fields(RunConfig)}


@pytest.mark.parametrize("section", sorted(SECTIONS))
def test_a_setting_changes_exactly_the_stages_that_declare_it_and_those_after(built, section):
    changes = CHANGES.get(section)
    value = dataclasses.replace(getattr(RUN, section), **changes) if changes else 7  # the seed
    plan = built.plan(dataclasses.replace(RUN, **{section: value}))
    own = {stage.name for stage in STAGES if section in stage.config}
    assert own
    assert without(plan, "=") == after(own)
    assert {item.stage.name for item in plan.stages if item.changes} == own
    for item in plan.stages:
        if item.stage.name in own:
            assert item.state == "~"
            assert len(item.changes) == 1
            assert item.changes[0].name.startswith(section)
        elif item.state != "=":
            assert item.state == "?"
            assert set(item.after) <= own


def test_every_setting_of_a_section_counts_but_where_a_file_lies():
    """Of a file the contents decide, its snapshot. `canonical` has its own tests."""
    sections = [kind for kind in Section.__subclasses__() if kind.__module__ == config.__name__]
    uncounted = [
        (kind, field.name)
        for kind in sections
        for field in dataclasses.fields(kind)
        if not field.metadata.get("identity", True)
    ]
    assert uncounted == [(DatasetConfig, "path")]
    assert all(kind.canonical is Section.canonical for kind in sections)


def test_a_config_of_an_unknown_type_is_refused_rather_than_passed_over():
    run = dataclasses.replace(RUN)
    object.__setattr__(run, "sft", {RUN.sft})
    with pytest.raises(TypeError, match="no canonical form"):
        canonical_json(canonical_config(SFT, run))


def test_where_it_runs_never_changes_what_it_is(built):
    gpus = on_gpus(8, threads=7, device_batch_size=4, dollars_per_hour=9.0)
    place = {"home": Path("/elsewhere"), "store": "file:///other", "nodes": 2, "pool": "gpu"}
    plan = built.plan(placement=dataclasses.replace(gpus, **place))
    assert states(plan) == "=" * len(STAGES)
    assert [i.fingerprint for i in plan.stages] == [i.fingerprint for i in built.plan().stages]


def test_a_change_of_code_rebuilds_the_stages_that_reach_it(full_house):
    path = full_house.root / "nanochat_core" / "train" / "sft.py"
    path.write_text(path.read_text() + "LIMIT = 2\n")
    plan = full_house.plan()
    assert without(plan, "=") == after({"sft"})
    assert plan.of("sft").reason == "code nanochat_core.train.sft changed"
    assert plan.of("rl").reason == "after sft"
    path.with_name("midtrain.py").unlink()
    path.with_name("sft.py").write_text(path.read_text() + "import nanochat_core.more\n")
    path.parent.with_name("more.py").write_text("")
    path.with_name("midtrain.py").write_text("NAME = 1\n")
    assert "code nanochat_core.more added" in full_house.plan().of("sft").reason
    assert "code nanochat_core.shared removed" in full_house.plan().of("midtrain").reason


# Early cutoff.


@pytest.mark.parametrize("content", ["same", "other"])
def test_a_stage_rebuilt_with_the_same_bytes_stops_the_wave(house, content):
    house.build(content=lambda fingerprint: "same")
    path = house.root / "nanochat_core" / "train" / "tokenizer.py"
    path.write_text(path.read_text() + "REFACTORED = 1\n")
    plan = house.plan()
    assert without(plan, "=") == after({"tokenizer"})
    assert states(plan).count("~") == 1
    house.build(until="tokenizer", content=lambda fingerprint: content)
    plan = house.plan()
    if content == "same":
        assert without(plan, "=") == {"report"}  # which shows the tokenizer's new fingerprint
        assert plan.of("report").reason == "record tokenizer changed"
    else:
        assert plan.of("tokenizer").state == "="
        assert (plan.of("tokens").state, plan.of("rows").state) == ("~", "?")
        assert plan.of("tokens").reason == "input tokenizer changed"


# Reasons.


def test_the_reason_names_settings_with_both_values(built):
    run = dataclasses.replace(
        RUN,
        pretrain=dataclasses.replace(RUN.pretrain, num_steps=7),
        sft=dataclasses.replace(RUN.sft, mixture=RUN.sft.mixture[:-1]),
    )
    plan = built.plan(run)
    old = RUN.pretrain.num_steps
    assert plan.of("pretrain").reason == f"pretrain.num_steps {old} -> 7"
    sft = plan.of("sft")
    assert sft.state == "~"
    assert sft.reason == "sft.mixture[spelling_bee] removed; after pretrain"
    assert plan.of("midtrain").reason == "after pretrain"
    assert plan.of("chat_eval_rl").after == ("sft",)


def test_a_reason_is_against_the_nearest_artifact(house):
    far = scaling.run_for_depth(8)
    house.build(run=far, until="pretrain")
    house.build(until="pretrain")
    near = dataclasses.replace(RUN, pretrain=dataclasses.replace(RUN.pretrain, num_steps=7))
    assert house.plan(near).of("pretrain").reason.startswith("pretrain.num_steps")
    near = dataclasses.replace(far, pretrain=dataclasses.replace(far.pretrain, num_steps=7))
    assert len(house.plan(near).of("pretrain").changes) == 1
