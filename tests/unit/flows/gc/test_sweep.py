"""Deleting garbage: in which order, and what happens when others act, or death comes, meanwhile."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from flows.artifacts.pins import PINS
from flows.artifacts.revocations import revoke
from flows.identity.manifest import Manifest
from flows.identity.records import encode_record
from flows.leases import held_lease, lease
from nanochat_core.errors import StageError
from tests.support.flows.rubbish import (
    acquire,
    gc,
    look,
    make,
    make_grown,
    mark,
    start_collection,
)
from tests.support.flows.shelf import ACCEPTED, make_manifest, put_run, put_whole
from tests.support.reliability.memory_store import DAY, HOUR, MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def test_what_was_written_again_since_it_was_marked_waits_anew(store):
    manifest = make(store)
    store.now += 2 * DAY
    gc(store)
    store.now += 2 * DAY
    put_whole(store, manifest)
    store.now += DAY + HOUR
    assert look(store).deletable == {}
    assert manifest.ref.manifest_key in look(store).garbage


def test_an_attempt_is_as_young_as_its_youngest_file(store):
    manifest = make(store)
    put_run(store, "tiny-1", manifest)
    store.put(f"{manifest.ref.prefix}/files/dead/b", b"half")
    store.now += 2 * DAY
    gc(store)
    store.now += 2 * DAY
    store.put(f"{manifest.ref.prefix}/files/dead/a", b"half")
    assert look(store).deletable == {}


def test_what_is_in_use_again_loses_its_mark(store):
    manifest = make(store)
    mark(store)
    put_run(store, "tiny-1", manifest, status="failed")
    gc(store)
    store.delete("runs/tiny-1.json")
    store.deleted.clear()
    store.now += DAY
    gc(store)
    assert store.deleted == []


def test_a_run_that_waits_to_be_forgotten_keeps_what_it_names(store):
    manifest = make(store)
    store.now += 2 * DAY
    gc(store)
    put_run(store, "tiny-1", manifest, status="failed")
    store.now += 31 * DAY
    gc(store)
    assert store.deleted == []
    store.now += DAY
    gc(store)
    assert store.deleted[:2] == ["runs/tiny-1.json", manifest.ref.manifest_key]


def test_artifacts_that_share_files_both_ways_go_together(store):
    first = make_manifest("shards", config={"seed": 1})
    second = make_manifest("shards", config={"seed": 2})
    for one, other in ((first, second), (second, first)):
        files = (dataclasses.replace(one.files[0], key=other.files[0].key),)
        put_whole(store, dataclasses.replace(one, files=files))
    mark(store)
    gc(store)
    assert not [key for key in store.names("shards/") if not key.endswith("lease.json")]


def test_there_is_one_collection_at_a_time(store):
    held = start_collection(store)

    def pause(seconds: float) -> None:
        store.now += seconds
        held.renew()

    said: list[str] = []
    with pytest.raises(StageError, match="is being collected already by run gc"):
        gc(store, pause=pause, log=said.append)
    began = store.now
    gc(store, log=said.append)  # the other one was killed
    assert len(said) == 2
    assert all(line.startswith("waiting: garbage is being collected by run gc") for line in said)
    gc(store, log=said.append)
    assert len(said) == 2  # no other collects
    assert lease.TTL < store.now - began < lease.TTL + 5


@pytest.mark.parametrize("seconds", [-7200.0, -lease.TTL, lease.TTL + 1, 7200.0])
def test_a_collection_that_lives_is_not_disturbed_when_the_stores_clock_is_set(store, seconds):
    held, slept = start_collection(store), [0.0]

    def pause(length: float) -> None:
        slept[0] += length
        held.renew()

    store.now += seconds
    with pytest.raises(StageError, match="is being collected already by run gc"):
        gc(store, clock=lambda: slept[0], pause=pause)
    held.check()


def test_a_collection_that_stood_still_deletes_nothing_more(store):
    make(store)
    mark(store)

    def stand_still(what: str, count: int) -> None:
        if what == "artifacts":
            store.now += lease.TTL / 2 + 1

    with pytest.raises(held_lease.LeaseLost, match="stood still"):
        gc(store, watch=stand_still)
    assert [key.rpartition("/")[2] for key in store.deleted] == ["manifest.json"]


class Interrupting(MemoryStore):
    """A store that acts right before a key is examined."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[str, Callable[[], Any]] = {}

    def get_stored(self, key: str) -> Any:
        """See Store."""
        if act := self.before.pop(key, None):
            act()
        return super().get_stored(key)

    def head(self, key: str) -> Any:
        """See Store."""
        if act := self.before.pop(f"head {key}", None):
            act()
        return super().head(key)

    def before_delete(self, manifest: Manifest, act: Callable[[], Any]) -> None:
        """Act when the sweep, which has the lease by then, looks at a manifest again."""
        head = {f"head {manifest.ref.prefix}/manifest.json": act}
        self.before[manifest.ref.lease_key] = lambda: self.before.update(head)


def ready_to_sweep(store: MemoryStore) -> tuple[Manifest, Manifest]:
    source = make(store, "shards")
    made = make(store, "rows", inputs={"shards": source})
    mark(store)
    return source, made


def deleted_of(store: MemoryStore, *manifests: Manifest) -> list[str]:
    """The keys of these artifacts' objects that were deleted."""
    prefixes = tuple(manifest.ref.prefix for manifest in manifests)
    return [key for key in store.deleted if key.startswith(prefixes)]


def test_where_another_builds_meanwhile_nothing_is_deleted_nor_what_it_is_made_from():
    store = Interrupting()
    source, made = ready_to_sweep(store)
    # The first look at the lease is by the sweep: it was not there when roots were searched.
    store.before[made.ref.lease_key] = lambda: acquire(store, made)
    gc(store)
    assert deleted_of(store, source, made) == []


def test_where_another_builds_meanwhile_what_it_shares_with_others_stays():
    store = Interrupting()
    old = make(store, "shards")
    grown = make_grown(store, old)
    mark(store)
    store.before[grown.ref.lease_key] = lambda: acquire(store, grown)
    gc(store)
    assert {file.key for file in grown.files} <= store.names()


def test_where_another_builds_meanwhile_the_revocation_of_its_bytes_stays():
    store = Interrupting()
    wrong = make(store, seed=1)
    facts = {**ACCEPTED, "from": wrong.fingerprint}
    accepted = make(store, seed=2, accepted=facts)
    revoke(store, wrong, why="wrong", who="me", when="now")
    mark(store)
    store.before[accepted.ref.lease_key] = lambda: acquire(store, accepted)
    gc(store)
    assert wrong.ref.revocation_key in store.names()


def test_what_came_since_it_was_listed_stays():
    store = Interrupting()
    manifest, trained = make(store, seed=1), make(store, seed=2)
    put_run(store, "tiny-1", manifest)
    put_run(store, "tiny-2", trained)
    new = [f"{manifest.ref.prefix}/files/dead/b", f"{trained.ref.prefix}/checkpoints/step-1/o-1/b"]
    for key in new:
        store.put(f"{key.removesuffix('b')}a", b"half")
    alone = make_manifest("sft")
    acquire(store, alone).release()
    new.append(f"{alone.ref.prefix}/files/c/data")
    mark(store)

    def build() -> None:
        for key in new:
            store.put(key, b"x")

    store.before[trained.ref.lease_key] = build
    gc(store)
    assert {*new, alone.ref.lease_key} <= store.names()
    assert f"{manifest.ref.prefix}/files/dead/a" not in store.names()
    assert f"{trained.ref.prefix}/checkpoints/step-1/o-1/a" in store.names()


def test_a_pin_that_is_gone_when_it_is_read_was_of_something_in_the_list():
    store = Interrupting()
    old = make(store, "shards")
    mark(store)
    key = f"{PINS}1.json"
    store.put(
        key, encode_record({"artifacts": [[old.stage, old.fingerprint]], "why": ""}, format=1)
    )

    def publish_and_remove_pin() -> None:
        make_grown(store, old)
        store.delete(key)

    store.before[key] = publish_and_remove_pin
    gc(store)
    assert old.files[0].key in store.names()


def test_where_a_manifest_was_withdrawn_meanwhile_nothing_is_deleted():
    store = Interrupting()
    source, made = ready_to_sweep(store)
    manifest = made.ref.manifest_key
    store.before_delete(made, lambda: store.delete(manifest))
    gc(store)
    assert deleted_of(store, source, made) == [manifest]


def test_what_was_published_again_meanwhile_stays():
    store = Interrupting()
    source, made = ready_to_sweep(store)
    store.before_delete(made, lambda: put_whole(store, made))
    gc(store)
    assert deleted_of(store, source, made) == []


def test_a_run_that_starts_again_meanwhile_keeps_its_record():
    store = Interrupting()
    manifest = make(store)
    put_run(store, "tiny-1", manifest, status="failed")
    store.now += 31 * DAY
    gc(store)
    store.now += DAY
    store.before["head runs/tiny-1.json"] = lambda: put_run(store, "tiny-1", manifest)
    gc(store)
    assert "runs/tiny-1.json" in store.names()


def test_only_records_are_read_and_each_at_most_twice():
    asked: list[str] = []

    class Counting(MemoryStore):
        def get_stored(self, key: str) -> Any:
            asked.append(key)
            return super().get_stored(key)

    store = Counting()
    for seed in range(20):
        manifest = make(store, seed=seed)
        for shard in range(20):
            store.put(f"{manifest.ref.prefix}/files/a/{shard}", b"x")
        if seed % 2:
            put_run(store, f"tiny-{seed}", manifest)
    store.now += 2 * DAY
    asked.clear()
    gc(store)
    kinds = [key.rpartition("/")[2] for key in asked if not key.startswith("gc/")]
    assert {kind for kind in kinds if not kind.startswith("tiny-")} == {"manifest.json"}
    assert len(kinds) == len(set(asked) - {key for key in asked if key.startswith("gc/")}) == 30
