"""What a plan asks of the store: how much, and how much of it one after the other."""

import dataclasses
from collections import Counter

import pytest

from flows.plan.plan import make_plan
from flows.stages import STAGES
from tests.support.flows.house import RUN
from tests.support.flows.shelf import Counting


def test_a_plan_with_nothing_to_run_asks_two_questions_a_stage(built):
    store = Counting(built.root.parent / "store")
    assert make_plan(RUN, store, built.work, root=built.root).up_to_date
    assert Counter(key.rpartition("/")[2] for key in store.gets) == {
        "manifest.json": len(STAGES),
        "revoked.json": len(STAGES),
        "redo.json": len(STAGES),
    }


@pytest.mark.parametrize("seed", [RUN.seed, RUN.seed + 1])
def test_a_plan_lists_once_and_reads_nothing_twice(built, seed):
    store = Counting(built.root.parent / "store")
    make_plan(dataclasses.replace(RUN, seed=seed), store, built.work, root=built.root)
    assert [prefix for prefix in store.lists if prefix.startswith("index/")] == ["index/"]
    records = [key for key in store.gets if key.endswith(("manifest.json", "revoked.json"))]
    assert len(records) == len(set(records))


@pytest.mark.parametrize("seed", [RUN.seed, RUN.seed + 1])
def test_questions_are_asked_together(built, seed):
    """Those about the newest artifacts, by eight threads."""
    store = Counting(built.root.parent / "store")
    store.meet(8, "manifest.json")
    plan = make_plan(dataclasses.replace(RUN, seed=seed), store, built.work, root=built.root)
    assert plan.up_to_date == (seed == RUN.seed)


def test_of_many_old_artifacts_only_the_latest_are_read(house):
    for seed in range(8):
        house.build(run=dataclasses.replace(RUN, seed=seed), until="shards")
    for number in range(40):  # of artifacts that are gone
        house.store.put(f"index/shards/20300101t000000z-{number:064d}", b"")
    store = Counting(house.root.parent / "store")
    make_plan(RUN, store, house.work, root=house.root)
    assert len(store.gets) < 40
