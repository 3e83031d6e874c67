"""A store in memory with artifacts, some of which are garbage, and its collections."""

import dataclasses
from typing import Any

from flows.artifacts.pins import SWEEP
from flows.gc.collect import Collected, collect, make_claim, plan_collection
from flows.gc.reach import Records, Rules, Survey
from flows.identity.manifest import Manifest
from flows.leases import held_lease
from infra.storage.base import Store
from tests.support.flows.shelf import make_manifest, put_artifact, put_whole
from tests.support.reliability.memory_store import DAY, MemoryStore

RULES = Rules(keep=30 * DAY, grace=DAY)


def ignore(what: str, count: int) -> None:
    """Ignore progress."""


def gc(store: MemoryStore, **options: Any) -> Collected:
    """One collection."""

    def pause(seconds: float) -> None:
        store.now += seconds

    facts = {"clock": lambda: store.now, "pause": pause, "threads": 1, "watch": ignore}
    facts["log"] = lambda text: None
    return collect(store, RULES, **{**facts, **options})


def look(store: MemoryStore) -> Survey:
    """What a collection would do."""
    return plan_collection(Records(store, threads=1), RULES, now=store.now, watch=ignore)


def mark(store: MemoryStore) -> None:
    """Have a collection mark what is garbage, and wait until it may be deleted."""
    store.now += 2 * DAY
    gc(store)
    store.now += DAY


def gc_until_clean(store: MemoryStore) -> None:
    """Mark, and delete when the grace is over; once more for what waited for that."""
    for _ in range(3):
        gc(store)
        store.now += DAY


def make(store: MemoryStore, stage: str = "rows", seed: int = 1, **options: Any) -> Manifest:
    """An artifact that differs from others by its seed."""
    return put_whole(store, make_manifest(stage, config={"seed": seed}, **options))


def make_grown(store: MemoryStore, old: Manifest) -> Manifest:
    """An artifact whose file is an older one's."""
    manifest = make_manifest("shards", config={"seed": 99})
    files = tuple(dataclasses.replace(f, key=old.files[0].key) for f in manifest.files)
    return put_artifact(store, dataclasses.replace(manifest, files=files, logs=()))


def make_other(manifest: Manifest) -> Manifest:
    """Another attempt at the same artifact."""
    key = f"{manifest.ref.prefix}/files/b/data"
    return dataclasses.replace(
        manifest, files=(dataclasses.replace(manifest.files[0], key=key),), logs=()
    )


def acquire(store: MemoryStore, manifest: Manifest, run: str = "tiny-9") -> held_lease.HeldLease:
    """The right to build it."""
    me = dataclasses.replace(make_claim(), run=run)
    held = held_lease.try_acquire(store, manifest.ref, me)
    assert isinstance(held, held_lease.HeldLease)
    return held


def start_collection(store: Store) -> held_lease.HeldLease:
    """The lease of a collection, which is under way until the lease is released or expires."""
    held = held_lease.try_acquire(store, SWEEP, make_claim())
    assert isinstance(held, held_lease.HeldLease)
    return held
