"""The right to build one fingerprint, for a while: {stage}/{fingerprint}/lease.json in the store.

Its owner renews it while it builds, and others wait. It changes hands when it was given back, when
it was not renewed for `ttl` seconds, or at once when its owner is known to be dead. Each owner has
an epoch, one more than the one before: whoever goes on after having lost the lease (its machine
slept, its network was away) finds another epoch and stops. The record stays as long as anything of
the fingerprint does, so epochs only grow.

Leases save money. That there is one artifact in the end comes from put-if-absent of its manifest;
`check` right before it keeps an owner that lost its lease from publishing.

Here are the steps, without clocks, threads or chance: ages are by the store's clock, and who one
is, is an argument. flows/leases/held_lease.py puts threads around them.
"""

from dataclasses import asdict, dataclass, replace

from flows.identity.fingerprint import short
from flows.identity.record_types import Count, read_record
from flows.identity.records import encode_record, find_stored
from infra.storage.base import Store, StoreUnavailable, VersionedObject
from nanochat_core.errors import StageError, StoreError

FORMAT = 1
TTL = 90.0  # seconds without renewal after which anybody may take a lease over
BEAT = 10.0  # seconds between renewals
_TRIES = 4  # a swap fails because somebody else's succeeded: to meet that more often takes a crowd


class LeaseLost(StageError):
    """Another process may be building now. What this one saved stays and is used again."""


@dataclass(frozen=True, kw_only=True)
class Claimant:
    """Who wants to build: one of it for each attempt, so that its bytes are nobody else's."""

    owner: str  # uuid, hex
    run: str
    host: str
    pid: int
    home: str  # file_lock.home_id of the home in which it holds the fingerprint's kernel lock
    since: str  # UTC, 2026-11-21T05:53:38Z; told to people, never compared


@dataclass(frozen=True, kw_only=True)
class LeaseRecord:
    """What lease.json says."""

    owner: str
    run: str
    host: str
    pid: int
    home: str
    since: str
    epoch: Count  # 1 for the first owner
    # Writes by this owner: no two records have the same bytes, so no version comes back.
    beat: Count
    step: Count  # of the job, and `total` of it; 0 of 0 before it says so
    total: Count
    released: bool  # given back; the record stays, because the next epoch follows from it


@dataclass(frozen=True, kw_only=True)
class LeaseGrant:
    """A lease that is ours, as of its last renewal."""

    stage: str
    fingerprint: str
    record: LeaseRecord

    @property
    def name(self) -> str:
        """What is built under it, as a person calls it: stage/fingerprint."""
        return f"{self.stage}/{short(self.fingerprint)}"

    @property
    def owner(self) -> str:
        """Whose it is."""
        return self.record.owner

    @property
    def epoch(self) -> int:
        """How many owners there were, this one included."""
        return self.record.epoch


@dataclass(frozen=True, kw_only=True)
class LeaseHolder:
    """Somebody else who is building, as far as is known."""

    record: LeaseRecord
    age: float  # seconds since its last renewal

    @property
    def host(self) -> str:
        """The machine it builds on."""
        return self.record.host

    @property
    def pid(self) -> int:
        """Its process there."""
        return self.record.pid

    def __str__(self) -> str:
        record = self.record
        step = f"step {record.step}/{record.total}, " if record.total else ""
        return f"run {record.run} on host {record.host}, {step}heartbeat {self.age:.0f} s ago"


def check_decides(store: Store) -> None:
    """Raise StoreError if a store cannot decide between writers, so that nothing is built in it."""
    if missing := store.missing_guarantees():
        raise StoreError(
            f"store {store.url} cannot hold a run: it {' and '.join(missing)}",
            hint="use a store with atomic If-None-Match and If-Match; `push`, `fetch`, `ls` and "
            "`plan` work with this one, as a mirror that one process at a time writes to",
        )


def try_acquire(
    store: Store, stage: str, fingerprint: str, me: Claimant, *, ttl: float
) -> LeaseGrant | LeaseHolder:
    """The lease, if it can be had; else who has it.

    The caller holds the kernel lock of this fingerprint in its home, so another owner in the same
    home is dead, and its lease is taken over at once. May be repeated with the same claim after an
    error: a lease that was ours without our knowing is found to be. Raises StoreError where the
    store cannot decide.
    """
    check_decides(store)
    key = _key(stage, fingerprint)
    seen = None
    for _ in range(_TRIES):
        found = _find(store, stage, fingerprint)
        if found is None:
            mine = _first(me)
            if store.put_if_absent(key, _to_json(mine)):
                return LeaseGrant(stage=stage, fingerprint=fingerprint, record=mine)
            continue
        record, stored = found
        seen = LeaseHolder(record=record, age=stored.age)
        if not _may_take(seen, me, ttl=ttl):
            return seen
        mine = _next(record, me)
        if store.put_if_same(key, _to_json(mine), version=stored.version):
            return LeaseGrant(stage=stage, fingerprint=fingerprint, record=mine)
    if seen is not None:
        return seen
    raise StoreUnavailable(f"{store.url}/{key} exists for writers and not for readers")


def renew(store: Store, held: LeaseGrant, *, step: int, total: int) -> LeaseGrant:
    """Tell the store that we are alive and how far the job is. Raises LeaseLost."""
    key = _key(held.stage, held.fingerprint)
    for _ in range(_TRIES):
        record, stored = _ours(store, held)
        new = replace(record, beat=record.beat + 1, step=step, total=total)
        if store.put_if_same(key, _to_json(new), version=stored.version):
            return replace(held, record=new)
    raise StoreUnavailable(f"{store.url}/{key} changes whenever it is renewed")


def check(store: Store, held: LeaseGrant) -> None:
    """Ask the store whether the lease is still ours. Raises LeaseLost."""
    _ours(store, held)


def release(store: Store, held: LeaseGrant) -> None:
    """Give the lease back, so that the next owner need not wait. Nothing happens if it was lost."""
    key = _key(held.stage, held.fingerprint)
    for _ in range(_TRIES):
        try:
            record, stored = _ours(store, held)
        except LeaseLost:
            return
        given_back = replace(record, beat=record.beat + 1, released=True)
        if store.put_if_same(key, _to_json(given_back), version=stored.version):
            return


def find_holder(
    store: Store, stage: str, fingerprint: str, *, ttl: float = TTL, dead: str | None = None
) -> LeaseHolder | None:
    """Who is building, or None when nobody is.

    `dead` is a home in which nobody holds the fingerprint's kernel lock: its lease counts as none.
    """
    found = _find(store, stage, fingerprint)
    if found is None:
        return None
    record, stored = found
    if record.released or record.home == dead or stored.age > ttl:
        return None
    return LeaseHolder(record=record, age=stored.age)


def _may_take(holder: LeaseHolder, me: Claimant, *, ttl: float) -> bool:
    record = holder.record
    return record.released or record.home == me.home or holder.age > ttl


def _first(me: Claimant) -> LeaseRecord:
    return LeaseRecord(**asdict(me), epoch=1, beat=1, step=0, total=0, released=False)


def _next(record: LeaseRecord, me: Claimant) -> LeaseRecord:
    """The record of whoever comes after this one: another epoch, unless it is ours already."""
    if record.owner == me.owner and not record.released:
        return replace(record, beat=record.beat + 1)
    return replace(_first(me), epoch=record.epoch + 1)


def _ours(store: Store, held: LeaseGrant) -> tuple[LeaseRecord, VersionedObject]:
    """The record as it is now, if it still says that the lease is ours. Raises LeaseLost."""
    found = _find(store, held.stage, held.fingerprint)
    if found is None:
        raise _lost(held, ": its record was removed")
    record, stored = found
    if not _is_of(held, record):
        raise _lost(held, f" to {LeaseHolder(record=record, age=stored.age)}")
    if record.released:
        raise _lost(held, ": it was given back")
    return record, stored


def _is_of(held: LeaseGrant, record: LeaseRecord) -> bool:
    return (record.owner, record.epoch) == (held.owner, held.epoch)


def _lost(held: LeaseGrant, how: str) -> LeaseLost:
    return LeaseLost(
        f"{held.name} lost its lease{how}",
        hint="run the same command again: it waits for whoever builds now and uses the result",
    )


def _key(stage: str, fingerprint: str) -> str:
    return f"{stage}/{fingerprint}/lease.json"


def _to_json(record: LeaseRecord) -> bytes:
    return encode_record(asdict(record), format=FORMAT)


def _find(store: Store, stage: str, fingerprint: str) -> tuple[LeaseRecord, VersionedObject] | None:
    key = _key(stage, fingerprint)
    found = find_stored(store, key, format=FORMAT)
    if found is None:
        return None
    tree, stored = found
    mend = "delete it when no process builds this, then run the command again"
    where = f"{store.url}/{key}"
    return read_record(LeaseRecord, tree, where=where, what="a lease", mend=mend), stored
