"""Delete garbage in an order that leaves a sound store whenever it stops.

First run records, then manifests (an artifact before those it was made from), then the files that
no manifest names any more: no process finds a manifest without its files. The records of a
fingerprint are deleted under its lease, so no process builds there meanwhile; where one does, the
fingerprint is spared with all that it was made from. What was written since the survey is spared
too.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from flows.artifacts.pins import SWEEP
from flows.gc.inventory import Kind, Piece
from flows.gc.reach import Edges, Records, Survey
from flows.identity.ref import ArtifactRef
from flows.leases.held_lease import HeldLease, LeaseLost, try_acquire
from flows.leases.lease import BEAT, TTL, Lease, LeaseHolder, Observer
from flows.render.text import duration
from infra.polling import ASK_SECONDS
from infra.storage.base import ObjectInfo, ObjectNotFound, Store
from nanochat_core.errors import StageError, StoreError

_UNDER_LEASE: tuple[Kind, ...] = ("artifact", "divergent", "revocation")
_COMMIT = "COMMIT.json"
_FORGOTTEN = 3600.0  # seconds since the last renewal of a lease on garbage; the grace is as long

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# Called with what is being done, and the number of items done.
Watch: TypeAlias = Callable[[str, int], None]


def clock() -> float:
    """Return monotonic seconds, suspends (laptop sleep) included: a lease expires in them too."""
    # macOS has no CLOCK_BOOTTIME.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Sweeper:
    """The lease on collecting in one store. Its user renews it by calling `beat`.

    Processes that wait for the collection continue when its lease has expired, TTL seconds after
    the last renewal. So nothing is deleted later than half of that after the last renewal began.
    """

    def __init__(
        self,
        store: Store,
        claim: Lease,
        *,
        clock: Callable[[], float],
        pause: Callable[[float], None],
        log: Callable[[str], None],
    ) -> None:
        self.clock = clock
        observer = Observer(clock)
        found: LeaseHolder | None = None
        while True:
            self._renewed = clock()  # before the request, as in `renew`
            held = try_acquire(store, SWEEP, claim, ttl=TTL, observer=observer)
            if isinstance(held, HeldLease):
                break
            # Another collector renews its lease soon; the lease of a dead one expires.
            if found is not None and held.record != found.record:
                raise StageError(
                    f"garbage is being collected already by {held}",
                    hint="one collection at a time is enough",
                )
            if found is None:
                log(f"waiting: garbage is being collected by {held}")
            found = held
            pause(ASK_SECONDS)
        self._held = held

    def beat(self) -> None:
        """Renew the lease if it is due. Raises LeaseLost. For the main thread only."""
        self.check()
        if self.clock() - self._renewed >= BEAT:
            with contextlib.suppress(StoreError):  # the next beat tries again
                self.renew()

    def renew(self) -> None:
        """Renew the lease. Raises LeaseLost, StoreError."""
        # Before the request: the store counts from when it writes the record, which is later.
        now = self.clock()
        self._held.renew()
        self._renewed = now

    def check(self) -> None:
        """Raise LeaseLost if half of the lease's life is over. Call right before each deletion."""
        # Half, not all: the other half is for a request that hangs or arrives late.
        seconds = self.clock() - self._renewed
        if seconds > TTL / 2:
            raise LeaseLost(
                f"the lease of the collection was not renewed for {duration(seconds)}: the store "
                "or this machine stood still",
                hint="nothing is damaged; run the same command again",
            )

    def release(self) -> None:
        """Release the lease, so that processes that wait continue at once."""
        with contextlib.suppress(StoreError):  # it expires
            self._held.release()


@dataclass
class Deletion:
    """The deletion of what a survey found deletable, and its result; a later one resumes it."""

    records: Records
    survey: Survey
    sweeper: Sweeper
    claim: Callable[[], Lease]
    watch: Watch
    spared: set[ArtifactRef] = field(default_factory=set[ArtifactRef])
    names: set[str] = field(default_factory=set[str])  # pieces that are gone
    objects: int = 0  # that were deleted
    size: int = 0  # bytes of these
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Delete it. Raises LeaseLost and StoreError."""
        # Run records name artifacts, so they are deleted first; what only leads to them last.
        self._each("run records", self._delete_unchanged, self._of("run record", "pin"))
        # Fingerprints with files alone too. A builder that uploaded them and then slept must find
        # another epoch, or it would publish a manifest of files that are gone.
        under_lease = self._of(*_UNDER_LEASE, "checkpoints", "files", "logs")
        # Level by level: an artifact is gone before any that it was made from.
        for level in _dependents_first(under_lease, self.survey.edges):
            self._clear_all(level)
        bulk = self._of("files", "logs", "checkpoints")
        files = [piece for piece in bulk if piece.place not in self.spared]
        self._each("files", self._delete, self._keys_of(files))
        for piece in files:
            self._note(piece)
        self._each("index entries", self._delete_unchanged, self._of("index entry", "name"))
        self._each("leases", self._delete_lease, self._of("lease"))

    def _of(self, *kinds: Kind) -> list[Piece]:
        return [piece for piece in self.survey.deletable.values() if piece.kind in kinds]

    def _each(
        self, what: str, function: Callable[[_Item], _Result], items: Iterable[_Item]
    ) -> list[_Result]:
        results: list[_Result] = []
        for result in self.records.each(function, items):
            results.append(result)
            self.watch(what, len(results))
        return results

    def _clear_all(self, level: Mapping[ArtifactRef, list[Piece]]) -> None:
        """Delete the records of these artifacts, unless a spared artifact needs them."""
        free = {place: pieces for place, pieces in level.items() if place not in self.spared}
        spared = level.keys() - free.keys()
        cleared = self._each("artifacts", lambda item: self._clear(*item), free.items())
        spared |= {place for place, is_clear in zip(free, cleared, strict=True) if not is_clear}
        for place in spared:
            # With all that it names: later levels skip it.
            self.spared.add(place)
            if edges := self.survey.edges.get(place):
                self.spared.update(edges.leads_to)

    def _acquire(self, place: ArtifactRef) -> HeldLease | LeaseHolder:
        return try_acquire(self.records.store, place, self.claim(), ttl=_FORGOTTEN)

    def _clear(self, place: ArtifactRef, pieces: list[Piece]) -> bool:
        """Delete records and checkpoints of one fingerprint. Returns False if it is in use."""
        # A new claim for each acquisition: no two write records with the same bytes.
        held = self._acquire(place)
        if isinstance(held, LeaseHolder):
            return False
        try:
            for kind in _UNDER_LEASE:
                for piece in pieces:
                    if piece.kind == kind and not self._delete_unchanged(piece):
                        return False
            return all(self._end_checkpoints(p) for p in pieces if p.kind == "checkpoints")
        finally:
            with contextlib.suppress(StoreError):  # it expires
                held.release()

    def _end_checkpoints(self, piece: Piece) -> bool:
        """Delete each COMMIT.json. Returns False, deleting none, if a checkpoint is new."""
        entries = list(self.records.store.list(piece.name))
        if any(entry.modified > piece.newest for entry in entries):
            return False
        # Without COMMIT.json the rest is no checkpoint and may be deleted later, without the lease.
        for entry in entries:
            if entry.key.endswith(f"/{_COMMIT}"):
                self._delete(entry)
        return True

    def _delete_lease(self, piece: Piece) -> None:
        """Delete a lease if nothing else lies under its fingerprint, while holding it."""
        assert piece.place is not None
        held = self._acquire(piece.place)
        if isinstance(held, LeaseHolder):
            return
        # Listed under the lease: from here on no process that obeys leases adds anything.
        if [entry.key for entry in self.records.store.list(f"{piece.place.prefix}/")] != [
            piece.name
        ]:
            held.release()
            return
        # Not released afterwards: a release would only find the record gone.
        self._delete(self.records.store.head(piece.name))
        self._note(piece)

    def _delete_unchanged(self, piece: Piece) -> bool:
        """Delete a record if it is unchanged since the survey. Returns whether it was deleted."""
        try:
            entry = self.records.store.head(piece.name)
        except ObjectNotFound:
            return False
        if entry.modified > piece.newest:
            return False
        self._delete(entry)
        self._note(piece)
        return True

    def _keys_of(self, pieces: Iterable[Piece]) -> Iterator[ObjectInfo]:
        for piece in pieces:
            for entry in self.records.store.list(piece.name):
                if entry.modified <= piece.newest:  # else written since the survey
                    yield entry

    def _delete(self, entry: ObjectInfo) -> None:
        # Before each deletion: a collector that slept must not delete what is in use by now.
        self.sweeper.check()
        self.records.store.delete(entry.key)
        with self.lock:
            self.objects += 1
            self.size += entry.size

    def _note(self, piece: Piece) -> None:
        with self.lock:
            self.names.add(piece.name)


def _dependents_first(
    pieces: Iterable[Piece], edges: Mapping[ArtifactRef, Edges]
) -> Iterator[dict[ArtifactRef, list[Piece]]]:
    """Yield these pieces by artifact, in levels: no later level needs one of an earlier level."""
    left: dict[ArtifactRef, list[Piece]] = {}
    for piece in pieces:
        assert piece.place is not None
        left.setdefault(piece.place, []).append(piece)
    needs = {
        place: {other for other in edges[place].leads_to if other in left and other != place}
        for place in left
        if place in edges
    }
    while left:
        needed = {other for place in left for other in needs.get(place, ())}
        # Artifacts that share files both ways have no order; then they go together.
        level = {place: left[place] for place in left if place not in needed} or dict(left)
        yield level
        for place in level:
            del left[place]
