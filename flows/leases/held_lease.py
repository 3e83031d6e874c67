"""Hold a lease while a job runs: renew it, and notice when it is lost.

A lease is lost when its record names another owner, and only then. While the store does not answer
the job continues: no other process may want the lease, and what the job saves on this machine is
not lost by waiting. At the next contact the record decides. An owner that was replaced meanwhile is
kept from publishing by `check`, not by a clock.
"""

import contextlib
import threading
from collections.abc import Generator
from dataclasses import dataclass

from flows.identity.ref import ArtifactRef
from flows.leases.lease import (
    BEAT,
    TTL,
    Claimant,
    LeaseGrant,
    LeaseHolder,
    LeaseLost,
    Observer,
    check,
    release,
    renew,
    try_acquire,
)
from infra.polling import POLL_SECONDS
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, StoreError

_SECONDS_TO_END = 5.0  # for a heartbeat whose request is under way when the block ends
_UNREACHABLE = (StoreError, ArtifactError)  # a damaged answer decides as little as none


@dataclass(frozen=True, kw_only=True)
class LeaseTimings:
    """Intervals and limits around a lease, in seconds."""

    ttl: float = TTL
    beat: float = BEAT
    look: float = 1.0  # between the first looks at the store while waiting; backs off from there
    longest_look: float = 5.0
    say: float = 30.0  # between two log lines about the same owner
    meet: float = 600.0  # limit for the first rendezvous of the nodes of a stage


class HeldLease:
    """A lease that this process holds until it is lost; see `hold_lease`."""

    def __init__(
        self, store: Store, held: LeaseGrant, *, stop: threading.Event, terms: LeaseTimings
    ) -> None:
        self.ending = threading.Event()  # the lease is lost, or `stop` is set: ends the job
        self._store = store
        self._held = held
        self._stop = stop
        self._terms = terms
        self._progress = (held.record.step, held.record.total)
        self._endpoint: str | None = None
        self._error: LeaseLost | None = None
        self._over = threading.Event()  # the block has ended

    @property
    def owner(self) -> str:
        """Return the owner's id, recorded in everything written under this lease."""
        return self._held.record.owner

    @property
    def fencing_token(self) -> int:
        """Return the fencing token, recorded in everything written under this lease."""
        return self._held.record.epoch

    def note(self, *, step: int, total: int) -> None:
        """Note the job's progress; the next heartbeat puts it into the record."""
        # One assignment: the heartbeat thread never pairs an old step with a new total.
        self._progress = (step, total)

    @property
    def total(self) -> int:
        """Return the job's steps as last noted."""
        return self._progress[1]

    def announce(self, endpoint: str) -> None:
        """Put host:port into the record at once. Raises LeaseLost, StoreError."""
        self._endpoint = endpoint  # which every later heartbeat repeats
        self._renew()

    def check(self) -> None:
        """Read the record. Raises LeaseLost if another process has acquired the lease since.

        The store alone decides: a lease that expired, and that no process took over, is still ours.
        """
        check(self._store, self._held)

    def raise_if_lost(self) -> None:
        """Raise LeaseLost, with the reason, if a heartbeat found the lease lost."""
        if self._error is not None:
            raise self._error

    @contextlib.contextmanager
    def keep(self) -> Generator[None]:
        """Renew the lease while the block runs, and release it at its end."""
        beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        watching = threading.Thread(target=self._watch, name="lease", daemon=True)
        beating.start()
        watching.start()
        try:
            yield
        finally:
            self._over.set()
            watching.join()
            beating.join(_SECONDS_TO_END)
            # A heartbeat that still hangs in the store could interfere with the release; then the
            # lease is left to expire.
            if not beating.is_alive():
                with contextlib.suppress(*_UNREACHABLE):
                    release(self._store, self._held)

    def _beat(self) -> None:
        while not self._over.wait(self._terms.beat):
            try:
                self._renew()
            except LeaseLost as error:
                self._error = error  # before the event: a thread that sees it finds the reason
                self.ending.set()
                return
            except _UNREACHABLE:
                continue  # the record decides when it can be read again

    def _renew(self) -> None:
        step, total = self._progress
        self._held = renew(self._store, self._held, step=step, total=total, endpoint=self._endpoint)

    def _watch(self) -> None:
        """Set `ending` when the run is stopped.

        In a thread of its own, because a heartbeat may hang in the store for minutes.
        """
        while not self._over.wait(POLL_SECONDS):
            if self._stop.is_set():
                self.ending.set()
                return


@contextlib.contextmanager
def hold_lease(
    store: Store,
    ref: ArtifactRef,
    me: Claimant,
    *,
    stop: threading.Event,
    terms: LeaseTimings,
    observer: Observer | None = None,
) -> Generator[HeldLease | LeaseHolder]:
    """Hold the lease of a fingerprint while the block runs, or yield its holder if it is taken.

    Does not wait. As for `try_acquire`, the caller holds the fingerprint's kernel lock, and passes
    the same `observer` to each try. The lease is released when the block ends, however it ends.
    """
    found = try_acquire(store, ref, me, ttl=terms.ttl, observer=observer)
    if isinstance(found, LeaseHolder):
        yield found
        return
    lease = HeldLease(store, found, stop=stop, terms=terms)
    with lease.keep():
        yield lease
