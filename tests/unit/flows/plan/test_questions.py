"""What a plan asks of the store: how much, and how much of it one after the other."""

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.plan.plan import make_plan
from flows.stages import STAGES
from infra.storage.base import ObjectInfo, VersionedObject
from infra.storage.local import LocalStore
from nanochat_core.errors import StoreError
from tests.support.flows.house import RUN, House

DELAY = 0.1  # seconds; of a store in another region


class Counting(LocalStore):
    """Notes what is read."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.reads: list[str] = []

    def get(self, key: str, *, size: int | None = None) -> bytes:
        self.reads.append(key)
        return super().get(key, size=size)

    def get_stored(self, key: str) -> VersionedObject:
        self.reads.append(key)
        return super().get_stored(key)


class Far(LocalStore):
    """Every answer takes a while."""

    def get(self, key: str, *, size: int | None = None) -> bytes:
        time.sleep(DELAY)
        return super().get(key, size=size)

    def get_stored(self, key: str) -> VersionedObject:
        time.sleep(DELAY)
        return super().get_stored(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        time.sleep(DELAY)
        return super().list(prefix)


class LevelStore(LocalStore):
    """Counts how often a read begins while no other one is under way; each takes a while."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._lock = threading.Lock()
        self._under_way = self.levels = 0

    def get(self, key: str, *, size: int | None = None) -> bytes:
        with self._lock:
            self.levels += self._under_way == 0
            self._under_way += 1
        time.sleep(DELAY)
        with self._lock:
            self._under_way -= 1
        return super().get(key, size=size)


def test_a_plan_with_nothing_to_run_asks_two_questions_a_stage(built: House):
    store = Counting(built.root.parent / "store")
    assert make_plan(RUN, store, built.work, root=built.root).exit_code == 0
    assert Counter(key.rpartition("/")[2] for key in store.reads) == {
        "manifest.json": len(STAGES),
        "revoked.json": len(STAGES),
    }


@pytest.mark.parametrize("seed", [RUN.seed, RUN.seed + 1])
def test_a_plan_lists_once_and_reads_nothing_twice(built: House, seed: int):
    listed: list[str] = []

    class Listing(Counting):
        def list(self, prefix: str) -> Iterator[ObjectInfo]:
            listed.append(prefix)
            return super().list(prefix)

    store = Listing(built.root.parent / "store")
    make_plan(dataclasses.replace(RUN, seed=seed), store, built.work, root=built.root)
    assert [prefix for prefix in listed if prefix.startswith("index/")] == ["index/"]
    records = [key for key in store.reads if key.endswith(("manifest.json", "revoked.json"))]
    assert len(records) == len(set(records))


def test_of_the_newest_artifacts_all_is_read_at_the_same_time(built: House):
    """By eight threads, so in four rounds; one level of stages after the other takes more."""
    store = LevelStore(built.root.parent / "store")
    assert make_plan(RUN, store, built.work, root=built.root).exit_code == 0
    assert store.levels <= 4


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
        def get(self, key: str, *, size: int | None = None) -> bytes:
            asked.append(key)
            if "shards" in key:
                raise StoreError("no answer")
            time.sleep(3 * DELAY)  # until the error is known
            return super().get(key, size=size)

    store = Dying(built.root.parent / "store")
    with pytest.raises(StoreError, match="no answer"):
        make_plan(dataclasses.replace(RUN, seed=1), store, built.work, root=built.root)
    assert len(asked) < len(STAGES)
