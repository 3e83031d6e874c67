"""Reasons of a plan compare with what runs of the same profile made, and with nothing else."""

import dataclasses

import pytest

from flows.identity.manifest import Manifest
from flows.profiles import open_profile
from flows.stages import STAGES
from nanochat_core.config import RunConfig
from tests.support.flows.house import House, states, write_code
from tests.support.flows.shelf import put_run

TINY, D12 = open_profile("tiny").run, open_profile("d12", snapshots=False).run


def with_seed(seed: int, run: RunConfig = TINY) -> RunConfig:
    return dataclasses.replace(run, seed=seed)


def made(house: House, run: RunConfig, name: str, profile: str, number: int = 1) -> None:
    """A recorded run of a profile that built everything."""
    built = house.build(run=run)
    put_run(
        house.store,
        f"{name}-2026112{number}t060000z-0a1b",
        *built.values(),
        name=name,
        profile=profile,
        started=f"2026-11-2{number}T06:00:00Z",
    )


def test_what_was_never_built_for_a_profile_is_to_be_built_not_rebuilt(house):
    put_run(house.store, "tiny-1", *house.build(run=TINY).values())
    plan = house.plan(D12, profile="d12")
    assert states(plan) == "+" * len(STAGES)
    assert {(item.reason, item.changes) for item in plan.stages} == {("", ())}
    assert states(house.plan(D12)) != states(plan)  # without a profile all artifacts count
    made(house, D12, "d12", "d12", 2)
    again = house.plan(dataclasses.replace(D12, seed=5), profile="d12")
    assert {item.state for item in again.stages} == {"~", "?"}
    assert again.of("shards").reason == f"seed {D12.seed} -> 5"


@pytest.mark.parametrize("name", ["tiny", "tiny-1a2b3c", "mine"])
def test_runs_of_other_profiles_hide_no_reason(house, name):
    made(house, TINY, name, "tiny")
    for number in range(2, 9):
        made(house, with_seed(number, D12), f"large{number}", "d12", number)
    put_run(house.store, "tiny-1", profile="d12")  # by which all artifacts were made
    write_code(house.root)
    (house.root / "nanochat_core" / "shared.py").write_text("SHARED = 2\n")
    plan = house.plan(TINY, profile="tiny")
    if name == "mine":  # of runs of any name the last four are read
        assert {item.state for item in plan.stages} == {"+"}
    else:
        assert plan.of("shards").reason == "code nanochat_core.shared changed"


def test_the_nearest_run_of_a_profile_is_compared_with_not_the_last(house):
    made(house, TINY, "tiny", "tiny", 1)
    for number in range(2, 9):
        made(house, with_seed(number), f"tiny-{number}a", "tiny", number)
    steps = dataclasses.replace(TINY.pretrain, num_steps=7)
    plan = house.plan(dataclasses.replace(TINY, pretrain=steps), profile="tiny")
    assert plan.of("pretrain").reason == f"pretrain.num_steps {TINY.pretrain.num_steps} -> 7"


def test_an_artifact_whose_run_has_no_record_may_be_of_the_profile(house):
    built = house.build(run=TINY)
    assert house.plan(with_seed(3), profile="tiny").of("sft").reason.startswith("seed 42 -> 3")
    # The record of that very run shows that it is of another profile.
    put_run(house.store, run_of(built["sft"]), *built.values(), profile="d12")
    for entry in list(house.store.list("names/")):  # as an earlier version left it
        house.store.delete(entry.key)
    assert house.plan(with_seed(3), profile="tiny").of("sft").state == "+"


def run_of(manifest: Manifest) -> str:
    return manifest.provenance.run


def test_a_damaged_record_of_a_run_ends_no_plan(house):
    house.build(run=TINY)
    house.store.put("runs/tiny-1.json", b"{")
    assert house.plan(with_seed(3), profile="tiny").of("shards").state == "~"
