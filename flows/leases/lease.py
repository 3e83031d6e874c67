"""The lease on a fingerprint, the right to build it: {stage}/{fingerprint}/lease.json in the store.

Its owner renews it while it builds, and others wait. Another process may acquire it after it was
released, after it expired, or at once if the process of its owner is known to be dead. It expires
for an observer that saw the same owner, epoch and beat for `ttl` seconds of its own monotonic
clock: a clock that is wrong or was set, here or at the store, neither keeps a lease nor ends one.
Each owner has an epoch, a fencing token, one more than that of the owner before: a process that
continues after it lost the lease (its machine slept, its network was down) finds another epoch and
stops. The record stays as long as anything of the fingerprint does, so epochs only grow.

Leases avoid duplicate work. That there is only one artifact is guaranteed by put-if-absent of its
manifest; `HeldLease.check` right before it keeps an owner that lost its lease from publishing.
"""

import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Self

from flows.identity.record_types import Count, find_versioned
from flows.identity.records import encode_record
from flows.identity.ref import ArtifactRef
from flows.leases.process import Process
from flows.render.text import duration
from infra.storage.base import Store

FORMAT = 3
TTL = 90.0  # seconds without renewal after which a lease has expired
BEAT = TTL / 9  # seconds between renewals


@dataclass(frozen=True, kw_only=True)
class Lease(Process):
    """The contents of lease.json. A claim is the record that the first owner would write."""

    owner: str  # uuid, hex: another for each attempt, so no two write the same bytes
    run: str
    epoch: Count = 1  # the fencing token, by its name in stored records: 1 for the first owner
    # Writes by this owner. No two records have the same bytes: a version may be a hash of them
    # (an ETag), and a version that came back would let a write that arrives late succeed (ABA).
    beat: Count = 1
    step: Count = 0  # of the job, and `total` of it; 0 of 0 before it says so
    total: Count = 0
    released: bool = False  # the record stays, because the next epoch follows from it
    endpoint: str | None = None  # host:port at which the other nodes of the stage reach the owner

    @classmethod
    def claim(cls, run: str) -> Self:
        """Return a new claim of this process, which builds for a run."""
        return cls(owner=uuid.uuid4().hex, run=run, **asdict(Process.this()))

    def to_json(self) -> bytes:
        """Return the record as an object's bytes."""
        return encode_record(asdict(self), format=FORMAT)


@dataclass(frozen=True, kw_only=True)
class LeaseHolder:
    """The last owner of a lease, as far as its record says."""

    record: Lease
    version: str  # of the stored record
    age: float  # seconds since its last renewal, by the store's clock: for people
    silence: float  # seconds for which the observer saw no renewal; without an observer, the age

    def has_ended(self, ttl: float) -> bool:
        """Return whether another process may acquire the lease: it is free, expired or dead."""
        return self.record.released or self.silence > ttl or self.record.is_dead()

    def __str__(self) -> str:
        record = self.record
        step = f"step {record.step}/{record.total}, " if record.total else ""
        age = duration(round(self.age))
        return f"run {record.run} on host {record.host}, {step}heartbeat {age} ago"


class Observer:
    """Measures for how long one lease is unchanged, as this process has seen it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock  # monotonic seconds
        self._seen: tuple[str, int, int] | None = None
        self._since = 0.0

    def silence(self, record: Lease, *, asked: float) -> float:
        """Return the seconds without a renewal, given a record that was asked for at `asked`.

        From the first answer with this record to the last request: shorter than the truth.
        """
        beat = (record.owner, record.epoch, record.beat)
        if beat != self._seen:
            self._seen, self._since = beat, self.clock()
        return max(0.0, asked - self._since)


def find_holder(
    store: Store, ref: ArtifactRef, *, ttl: float = TTL, observer: Observer | None = None
) -> LeaseHolder | None:
    """Return the process that builds. None: the lease is absent, free or expired, or it is dead.

    Without an `observer` a lease expires by the store's clock, which may be wrong or set: displays
    may then be wrong, and waits end early. Garbage collection stays safe: it spares what is younger
    than its grace, and deletes under the lease, which it takes after hours only.
    """
    found = observe(store, ref, observer)
    return None if found is None or found.has_ended(ttl) else found


def observe(store: Store, ref: ArtifactRef, observer: Observer | None) -> LeaseHolder | None:
    """Return the last owner of the lease, whether it still builds or not; None if it had none."""
    asked = observer.clock() if observer else 0.0
    mend = "delete it when no process builds this, then run the command again"
    found = find_versioned(store, ref.lease_key, Lease, format=FORMAT, what="a lease", mend=mend)
    if found is None:
        return None
    record, stored = found
    silence = observer.silence(record, asked=asked) if observer else stored.age
    return LeaseHolder(record=record, version=stored.version, age=stored.age, silence=silence)
