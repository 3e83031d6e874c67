"""What changes a stage's identity in the plan, and what does not."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from flows.identity.fingerprint import canonical_config, canonical_json
from flows.profiles import PROFILES, open_profile
from flows.stages import STAGES
from nanochat_core import config, scaling
from nanochat_core.config import RunConfig
from nanochat_core.section import Section
from tests.support.flows.house import RUN, after, on_gpus, states, without

Leaf: TypeAlias = tuple[str | int, ...]


def leaves(value: Any, path: Leaf = ()) -> Iterator[Leaf]:
    """The path of every plain value in a config that is part of what it is."""
    return (leaf for leaf, counts in all_leaves(value, path) if counts)


def all_leaves(value: Any, path: Leaf = (), counts: bool = True) -> Iterator[tuple[Leaf, bool]]:
    """Every path through sections and tuples of sections, and whether an identity has it."""
    if isinstance(value, Section):
        for field in dataclasses.fields(value):  # type: ignore[arg-type]
            counts = field.metadata.get("identity", True)
            yield from all_leaves(getattr(value, field.name), (*path, field.name), counts)
    elif isinstance(value, tuple) and value and isinstance(value[0], Section):
        for index, item in enumerate(value):
            yield from all_leaves(item, (*path, index))
    else:
        yield path, counts


def other(value: Any) -> Any:
    """Another value of the same type, or of one that it may have instead of None."""
    if value is None:
        return "x"
    if type(value) is tuple:
        return (*value, value[-1] if value else "x")
    if type(value) is str:
        return f"{value}x"
    if type(value) is bool:
        return not value
    assert type(value) in (int, float), value
    return value + 1


def changed(value: Any, path: Leaf) -> Any:
    """A copy with one leaf changed, past the checks: what is tested is identity, not sense."""
    return replaced(value, path, other)


def replaced(value: Any, path: Leaf, change: Callable[[Any], Any]) -> Any:
    """A copy with `change` applied to the value at `path`."""
    if not path:
        return change(value)
    name, *rest = path
    if isinstance(value, tuple):
        items = enumerate(value)
        return tuple(replaced(v, tuple(rest), change) if i == name else v for i, v in items)
    copy = object.__new__(type(value))
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        new = replaced(item, tuple(rest), change) if field.name == name else item
        object.__setattr__(copy, field.name, new)
    return copy


# The last value of each section: the next test asks for every value.
SETTINGS_OF_SECTIONS = {path[:-1]: path for path in leaves(RUN)}.values()


@pytest.mark.parametrize("path", SETTINGS_OF_SECTIONS, ids=lambda p: ".".join(map(str, p)))
def test_a_setting_changes_exactly_the_stages_that_declare_it_and_those_after(built, path):
    plan = built.plan(changed(RUN, path))
    own = declaring(path)
    assert own
    assert without(plan, "=") == after(own)
    assert {item.stage.name for item in plan.stages if item.changes} == own
    for item in plan.stages:
        if item.stage.name in own:
            assert item.state == "~"
            assert 1 <= len(item.changes) <= 2  # a task of another name is one less and one more
            assert all(change.name.startswith(str(path[0])) for change in item.changes)
        elif item.state != "=":
            assert item.state == "?"
            assert set(item.after) <= own


def declaring(path: Leaf) -> set[str]:
    return {stage.name for stage in STAGES if path[0] in stage.config}


def configs(run: RunConfig) -> dict[str, bytes]:
    return {stage.name: canonical_json(canonical_config(stage, run)) for stage in STAGES}


def test_every_setting_of_every_profile_counts_for_the_stages_that_declare_it():
    """And for no other: those after see it by what their inputs hold."""
    seen: set[tuple[Leaf, str]] = set()  # no need to change the same value to the same again
    for name in PROFILES:
        run = open_profile(name).run
        before = configs(run)
        paths = {path: repr(value_at(run, path)) for path in leaves(run)}
        assert len(paths) > 100
        for path in [path for path, value in paths.items() if (path, value) not in seen]:
            new = changed(run, path)
            assert new != run, path
            now = configs(new)
            assert {stage for stage in before if before[stage] != now[stage]} == declaring(path)
            assert declaring(path), path
        seen.update(paths.items())


def value_at(value: Any, path: Leaf) -> Any:
    for part in path:
        value = getattr(value, part) if isinstance(part, str) else value[part]
    return value


@pytest.mark.parametrize("name", PROFILES)
def test_where_a_file_lies_counts_for_no_stage_and_one_entry_less_in_a_list_counts(name):
    """The contents of a file decide, which are a setting next to the path."""
    run = open_profile(name).run
    before, every = configs(run), set(leaves(run))
    places = [leaf for leaf, counts in all_leaves(run) if not counts]
    assert {leaf[-1] for leaf in places} == {"path"}
    for leaf in places:
        assert (*leaf[:-1], "snapshot") in every
        assert configs(changed(run, leaf)) == before
    lists = {path[:i] for path in every for i, part in enumerate(path) if type(part) is int}
    assert lists
    for path in lists:
        now = configs(replaced(run, path, lambda entries: entries[:-1]))
        assert {stage for stage in before if before[stage] != now[stage]} == declaring(path)


def test_the_profiles_have_every_setting_there_is():
    """A list of groups that is empty everywhere would hide the settings in it."""
    ours = [c for c in Section.__subclasses__() if c.__module__ == config.__name__]
    known = {(c.__name__, f.name) for c in ours for f in dataclasses.fields(c)}
    seen: set[tuple[str, str]] = set()
    for name in PROFILES:
        run = open_profile(name).run
        for path, _ in all_leaves(run):
            for depth, part in enumerate(path):
                if isinstance(part, str):
                    seen.add((type(value_at(run, path[:depth])).__name__, part))
    assert seen == known


def test_a_config_of_an_unknown_type_is_refused_rather_than_passed_over():
    run = replaced(RUN, ("sft", "num_epochs"), lambda value: {value})
    with pytest.raises(TypeError, match="no stable form"):
        configs(run)


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
