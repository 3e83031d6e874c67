"""What a plan asks of the store: how much, and how much of it one after the other."""

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.plan import make_plan
from flows.stages import STAGES
from infra.storage.base import Entry, Stored
from infra.storage.local import LocalStore
from nanochat_core.errors import StoreError
from tests.flows.house import RUN, House

DELAY = 0.1  # seconds; of a store in another region


class Counting(LocalStore):
    """Notes what is read."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.reads: list[str] = []

    def get(self, key: str, *, size: int | None = None) -> bytes:
        self.reads.append(key)
        return super().get(key, size=size)

    def get_stored(self, key: str) -> Stored:
        self.reads.append(key)
        return super().get_stored(key)


class Far(LocalStore):
    """Every answer takes a while."""

    def get(self, key: str, *, size: int | None = None) -> bytes:
        time.sleep(DELAY)
        return super().get(key, size=size)

    def get_stored(self, key: str) -> Stored:
        time.sleep(DELAY)
        return super().get_stored(key)

    def list(self, prefix: str) -> Iterator[Entry]:
        time.sleep(DELAY)
        return super().list(prefix)


def test_a_plan_with_nothing_to_run_asks_two_questions_a_stage(built: House):
    store = Counting(built.root.parent / "store")
    assert make_plan(RUN, store, built.work, root=built.root).exit_code == 0
    assert Counter(key.rpartition("/")[2] for key in store.reads) == {
        "manifest.json": len(STAGES),
        "revoked.json": len(STAGES),
    }


def test_of_many_old_artifacts_only_the_latest_are_read(house: House):
    for seed in range(8):
        house.build(run=dataclasses.replace(RUN, seed=seed), until="shards")
    for number in range(40):  # of artifacts that were put aside
        house.store.put(f"index/shards/20300101t000000z-{number:064d}", b"")
    store = Counting(house.root.parent / "store")
    make_plan(RUN, store, house.work, root=house.root)
    assert len(store.reads) < 40


@pytest.mark.parametrize("seed", [RUN.seed, RUN.seed + 1])
def test_questions_to_a_store_far_away_are_asked_together(built: House, seed: int):
    """One after the other they would take 2.8 s when nothing is to be run, and 9 s otherwise."""
    store = Far(built.root.parent / "store")
    began = time.monotonic()
    plan = make_plan(dataclasses.replace(RUN, seed=seed), store, built.work, root=built.root)
    assert plan.exit_code == (0 if seed == RUN.seed else 2)
    assert time.monotonic() - began < 2


def test_a_store_that_stops_answering_ends_the_plan_at_once(built: House):
    """Not after every question that was still waiting for its turn."""
    asked: list[str] = []

    class Dying(LocalStore):
        def list(self, prefix: str) -> Iterator[Entry]:
            asked.append(prefix)
            if "shards" in prefix:
                raise StoreError("no answer")
            time.sleep(3 * DELAY)  # until the error is known
            return super().list(prefix)

    store = Dying(built.root.parent / "store")
    with pytest.raises(StoreError, match="no answer"):
        make_plan(dataclasses.replace(RUN, seed=1), store, built.work, root=built.root)
    assert len(asked) < len(STAGES) - 2
