"""The lease on a fingerprint, the right to build it: {stage}/{fingerprint}/lease.json in the store.

Its owner renews it while it builds, and others wait. Another process may acquire it after it was
released, after it expired, or at once if its owner is known to be dead. It expires for an observer
that saw the same owner, epoch and beat for `ttl` seconds of its own monotonic clock: a clock that
is wrong or was set, here or at the store, neither keeps a lease nor ends one. Each owner has an
epoch, a fencing token, one more than that of the owner before: a process that continues after it
lost the lease (its machine slept, its network was away) finds another epoch and stops. The record
stays as long as anything of the fingerprint does, so epochs only grow.

Leases avoid duplicate work. That there is only one artifact is guaranteed by put-if-absent of its
manifest; `check` right before it keeps an owner that lost its lease from publishing.

This module has no clock, threads or randomness: the clock and the claimant are arguments, and ages
by the store's clock are for people. flows/leases/held_lease.py adds the threads.
"""

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import inf

from flows.identity.record_types import Count, read_record
from flows.identity.records import Earlier, encode_record, find_stored
from flows.identity.ref import ArtifactRef
from flows.render.text import duration
from infra.storage.base import Store, VersionedObject, swap_until_won
from nanochat_core.errors import StageError

FORMAT = 2
EARLIER: Earlier = {1: ()}
TTL = 90.0  # seconds without renewal after which a lease has expired
BEAT = TTL / 9  # seconds between renewals


class LeaseLost(StageError):
    """The lease is lost; another process may be building. What this one saved is resumed later."""


@dataclass(frozen=True, kw_only=True)
class Claimant:
    """A process that wants to build. Each attempt has its own, so no two write the same bytes."""

    owner: str  # uuid, hex
    run: str
    host: str
    pid: int
    home: str  # file_lock.home_id of the home in which it holds the fingerprint's kernel lock
    since: str  # UTC, 2026-11-21T05:53:38Z; for people, never compared


@dataclass(frozen=True, kw_only=True)
class LeaseRecord(Claimant):
    """The contents of lease.json."""

    epoch: Count  # the fencing token, by its name in stored records: 1 for the first owner
    # Writes by this owner. No two records have the same bytes: a version may be a hash of them
    # (an ETag), and a version that came back would let a write that arrives late succeed (ABA).
    beat: Count
    step: Count  # of the job, and `total` of it; 0 of 0 before it says so
    total: Count
    released: bool  # the record stays, because the next epoch follows from it
    endpoint: str | None = None  # host:port at which the other nodes of the stage reach the owner


@dataclass(frozen=True, kw_only=True)
class LeaseGrant:
    """A lease that this process holds, as of its last renewal."""

    ref: ArtifactRef
    record: LeaseRecord


@dataclass(frozen=True, kw_only=True)
class LeaseHolder:
    """Another process that builds, as far as its record says."""

    record: LeaseRecord
    age: float  # seconds since its last renewal, by the store's clock: for people
    silence: float = 0.0  # seconds for which the observer saw no renewal

    def __str__(self) -> str:
        record = self.record
        step = f"step {record.step}/{record.total}, " if record.total else ""
        age = duration(round(self.age))
        return f"run {record.run} on host {record.host}, {step}heartbeat {age} ago"


class Observer:
    """Measures for how long each lease's record is unchanged, as this process has seen it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock  # monotonic seconds
        self._seen: dict[ArtifactRef, tuple[tuple[str, int, int], float]] = {}

    def silence(self, ref: ArtifactRef, record: LeaseRecord, *, asked: float) -> float:
        """Return the seconds without a renewal, given a record that was asked for at `asked`.

        From the first answer with this record to the last request: shorter than the truth.
        """
        beat = (record.owner, record.epoch, record.beat)
        if ref not in self._seen or self._seen[ref][0] != beat:
            self._seen[ref] = beat, self.clock()
        return max(0.0, asked - self._seen[ref][1])


def try_acquire(
    store: Store,
    ref: ArtifactRef,
    me: Claimant,
    *,
    ttl: float,
    observer: Observer | None = None,
    forgotten: float = inf,
) -> LeaseGrant | LeaseHolder:
    """Return the lease if it could be acquired, else its holder. Does not wait.

    A caller that tries repeatedly passes the same `observer` each time; without one, a lease of
    another home is acquired only after its release. `forgotten` is an age by the store's clock,
    for a caller that cannot observe: an hour at least, so that a live lease is hardly taken for it.

    The caller holds the kernel lock of this fingerprint in its home, so another owner in the same
    home is dead, and its lease is taken over at once. Idempotent: after an error it may be repeated
    with the same claim, and finds a lease whose grant got no answer. Raises StoreError.
    """
    key = ref.lease_key
    observer = observer or Observer(lambda: 0.0)  # for which no lease is silent

    def swap() -> LeaseGrant | LeaseHolder | None:
        asked = observer.clock()
        found = _find(store, ref)
        if found is None:
            mine = _first(me)
            is_ours = store.put_if_absent(key, _to_json(mine))
            return LeaseGrant(ref=ref, record=mine) if is_ours else None
        record, stored = found
        silence = observer.silence(ref, record, asked=asked)
        holder = LeaseHolder(record=record, age=stored.age, silence=silence)
        if not _may_take(holder, me, ttl=ttl) and stored.age <= forgotten:
            return holder
        mine = _next(record, me)
        # On the version that was just read: of two processes that take over, one succeeds.
        is_ours = store.put_if_same(key, _to_json(mine), version=stored.version)
        return LeaseGrant(ref=ref, record=mine) if is_ours else None

    return swap_until_won(f"{store.url}/{key}", swap)


def renew(
    store: Store, held: LeaseGrant, *, step: int, total: int, endpoint: str | None = None
) -> LeaseGrant:
    """Renew the lease and record the job's progress and endpoint. Raises LeaseLost."""
    key = held.ref.lease_key

    def swap() -> LeaseGrant | None:
        record, stored = _ours(store, held)
        # From the stored record, not from `held`: an earlier renewal whose answer was lost counts.
        new = replace(record, beat=record.beat + 1, step=step, total=total, endpoint=endpoint)
        is_ours = store.put_if_same(key, _to_json(new), version=stored.version)
        return replace(held, record=new) if is_ours else None

    return swap_until_won(f"{store.url}/{key}", swap)


def check(store: Store, held: LeaseGrant) -> None:
    """Raise LeaseLost unless the record in the store still names this owner and epoch."""
    _ours(store, held)


def release(store: Store, held: LeaseGrant) -> None:
    """Release the lease, so that the next owner need not wait for it to expire. No-op if lost."""
    key = held.ref.lease_key

    def swap() -> bool | None:
        record, stored = _ours(store, held)
        released = replace(record, beat=record.beat + 1, released=True)
        return store.put_if_same(key, _to_json(released), version=stored.version) or None

    with contextlib.suppress(LeaseLost):
        swap_until_won(f"{store.url}/{key}", swap)


def find_holder(
    store: Store,
    ref: ArtifactRef,
    *,
    ttl: float = TTL,
    dead: str | None = None,
    observer: Observer | None = None,
) -> LeaseHolder | None:
    """Return the process that builds. None means no process: the lease is absent, free or expired.

    `dead` is a home in which no process holds the fingerprint's kernel lock: its leases do not
    count. Without an `observer` a lease expires by the store's clock, which may be wrong or set:
    displays may then be wrong, and waits end early. Garbage collection stays safe: it spares what
    is younger than its grace, and deletes under the lease, which must be `forgotten` to be taken.
    """
    asked = observer.clock() if observer else 0.0
    found = _find(store, ref)
    if found is None:
        return None
    record, stored = found
    silence = observer.silence(ref, record, asked=asked) if observer else 0.0
    if record.released or record.home == dead or (silence if observer else stored.age) > ttl:
        return None
    return LeaseHolder(record=record, age=stored.age, silence=silence)


def end_abandoned(store: Store, ref: ArtifactRef, found: LeaseRecord) -> None:
    """Release a lease that an observer saw expire, so that no other process waits for it.

    No-op if it was renewed or acquired meanwhile; its owner, if it lives, finds it lost.
    """
    stored = _find(store, ref)
    if stored is not None and stored[0] == found:
        ended = replace(found, beat=found.beat + 1, released=True)
        store.put_if_same(ref.lease_key, _to_json(ended), version=stored[1].version)


def _may_take(holder: LeaseHolder, me: Claimant, *, ttl: float) -> bool:
    record = holder.record
    # The same home: the caller holds its kernel lock, so the owner is dead, or is this very claim.
    return record.released or record.home == me.home or holder.silence > ttl


def _first(me: Claimant) -> LeaseRecord:
    return LeaseRecord(**asdict(me), epoch=1, beat=1, step=0, total=0, released=False)


def _next(record: LeaseRecord, me: Claimant) -> LeaseRecord:
    """Return the record with which `me` takes over: a new epoch, unless the lease is its own."""
    # Its own means that the answer to an earlier acquisition was lost: the epoch stays.
    if record.owner == me.owner and not record.released:
        return replace(record, beat=record.beat + 1)
    return replace(_first(me), epoch=record.epoch + 1)


def _ours(store: Store, held: LeaseGrant) -> tuple[LeaseRecord, VersionedObject]:
    """Return the stored record if it still names this owner and epoch. Raises LeaseLost."""
    found = _find(store, held.ref)
    if found is None:
        raise _lost(held, ": its record was removed")
    record, stored = found
    if not _is_of(held, record):
        raise _lost(held, f" to {LeaseHolder(record=record, age=stored.age)}")
    if record.released:
        raise _lost(held, ": it was given back")
    return record, stored


def _is_of(held: LeaseGrant, record: LeaseRecord) -> bool:
    # The epoch too: the same claim may acquire the lease anew after it was released.
    return (record.owner, record.epoch) == (held.record.owner, held.record.epoch)


def _lost(held: LeaseGrant, how: str) -> LeaseLost:
    return LeaseLost(
        f"{held.ref.name} lost its lease{how}",
        hint="if the run does not retry by itself, run the same command again: it waits for the "
        "current builder and uses its artifact",
    )


def _to_json(record: LeaseRecord) -> bytes:
    return encode_record(asdict(record), format=FORMAT)


def _find(store: Store, ref: ArtifactRef) -> tuple[LeaseRecord, VersionedObject] | None:
    key = ref.lease_key
    found = find_stored(store, key, format=FORMAT, earlier=EARLIER)
    if found is None:
        return None
    tree, stored = found
    mend = "delete it when no process builds this, then run the command again"
    where = f"{store.url}/{key}"
    return read_record(LeaseRecord, tree, where=where, what="a lease", mend=mend), stored
