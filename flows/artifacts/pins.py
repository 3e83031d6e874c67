"""Pins keep artifacts from being collected while a command works with them.

Garbage collection acquires a lease, reads what is in use, and deletes the rest
(flows/gc/collect.py). A process that is about to use an existing artifact does three things in this
order: it records the use in the store (a run's record, or a pin); it waits while a collection is
under way, which may have read the records before; it looks for the artifact again. So either the
collector saw the record, or the process sees that the artifact is gone.

    gc/sweep/lease.json    the collector's lease, like that of a fingerprint
    gc/pins/{id}.json      artifacts that a command works with; removed when it ends
"""

import contextlib
import uuid
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from flows.identity.record_types import Digest, Name, find_record
from flows.identity.records import encode_record
from flows.identity.ref import ArtifactRef
from flows.leases.held_lease import HeldLease, try_acquire
from flows.leases.lease import TTL, Lease, Observer, find_holder
from infra.polling import ASK_SECONDS
from infra.storage.base import Store
from nanochat_core.errors import StoreError

SWEEP = ArtifactRef("gc", "sweep")  # no artifact: its lease is the collector's
PINS = "gc/pins/"
FORMAT = 1

Log: TypeAlias = Callable[[str], None]
Pause: TypeAlias = Callable[[float], None]  # sleeps; raises if the caller is to stop


@dataclass(frozen=True, kw_only=True)
class Pin:
    """Artifacts that must not be collected, and the reason."""

    artifacts: tuple[tuple[Name, Digest], ...]  # stage, fingerprint
    why: str

    @property
    def refs(self) -> tuple[ArtifactRef, ...]:
        """Return the artifacts."""
        return tuple(ArtifactRef(*item) for item in self.artifacts)


def reserve(store: Store, record: Callable[[], None], *, log: Log, pause: Pause) -> None:
    """Protect artifacts from collection, if they exist: the caller looks for them afterwards.

    `record` writes to the store that they are in use; it is called again after each collection that
    was waited for, and must be idempotent.
    """
    record()
    # What was written during a collection may have come too late for it, or been deleted with the
    # record that it replaced.
    while wait_for_sweep(store, log=log, pause=pause):
        record()


@contextlib.contextmanager
def pin(
    store: Store,
    artifacts: Iterable[ArtifactRef],
    *,
    why: str,
    log: Log,
    pause: Pause,
) -> Generator[None]:
    """Protect these artifacts, with all objects under their fingerprints, while the block runs.

    For work that belongs to no run, and for a manifest that names files of another artifact. The
    caller looks for the artifacts inside the block. The pin of a killed process expires at the age
    at which a run's record does.
    """
    key = f"{PINS}{uuid.uuid4().hex}.json"
    data = encode_record(
        {"artifacts": [list(place) for place in artifacts], "why": why}, format=FORMAT
    )
    try:
        reserve(store, lambda: store.put(key, data), log=log, pause=pause)
        yield
    finally:
        with contextlib.suppress(StoreError):  # it expires by itself
            store.delete(key)


def find_pin(store: Store, key: str) -> Pin | None:
    """Return the pin at `key`, or None if it is gone. Raises ArtifactError if it is damaged."""
    return find_record(store, key, Pin, format=FORMAT, what="a pin")


def wait_for_sweep(store: Store, *, log: Log, pause: Pause) -> bool:
    """Wait until no process collects garbage. Returns whether it had to wait. One GET if not.

    The lease of a collector that was killed is ended when it has expired.
    """
    reported: str | None = None
    slept = 0.0
    observer = Observer(lambda: slept)  # a sleep takes at least as long
    while (holder := find_holder(store, SWEEP, ttl=inf, observer=observer)) is not None:
        if holder.silence > TTL:
            taken = try_acquire(store, SWEEP, Lease.claim("gc"), ttl=TTL, observer=observer)
            if isinstance(taken, HeldLease):
                taken.release()
            continue
        if reported != holder.record.owner:  # once for each collector
            reported = holder.record.owner
            log(f"waiting: garbage is being collected by {holder}")
        pause(ASK_SECONDS)
        slept += ASK_SECONDS
    return reported is not None
