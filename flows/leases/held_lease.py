"""Holds a lease while a job runs: renews it, and notices when it is lost.

A lease is lost when the record has another owner, and only then. While the store does not answer
the job continues: nothing says that another process wants the lease, and what the job saves on this
machine is not lost by waiting. At the next contact the record decides. An owner that was replaced
meanwhile is kept from publishing by `check`, not by a clock.
"""

import contextlib
import threading
from collections.abc import Generator
from dataclasses import dataclass

from flows.leases.lease import (
    BEAT,
    TTL,
    Claimant,
    LeaseGrant,
    LeaseHolder,
    LeaseLost,
    check,
    release,
    renew,
    try_acquire,
)
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, StoreError

_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_END = 5.0  # for a heartbeat that is on its way when the block ends
_UNREACHABLE = (StoreError, ArtifactError)  # a damaged answer is as good as none


@dataclass(frozen=True, kw_only=True)
class LeaseTimings:
    """How long things take around a lease, in seconds."""

    ttl: float = TTL
    beat: float = BEAT
    look: float = 1.0  # between the first looks of one who waits: each asks the store
    longest_look: float = 5.0
    say: float = 30.0  # between two lines about the same owner
    meet: float = 600.0  # that the nodes of a stage wait for each other at first


class HeldLease:
    """A lease that is ours until `lost` is set; see `hold_lease`."""

    def __init__(
        self, store: Store, held: LeaseGrant, *, stop: threading.Event, terms: LeaseTimings
    ) -> None:
        self.lost = threading.Event()
        self.ending = threading.Event()  # lost, or `stop` is set: what ends the job
        self._store = store
        self._held = held
        self._stop = stop
        self._terms = terms
        self._progress = (held.record.step, held.record.total)
        self._error: LeaseLost | None = None
        self._over = threading.Event()  # the block has ended

    @property
    def owner(self) -> str:
        """Recorded in what is written under this lease."""
        return self._held.owner

    @property
    def epoch(self) -> int:
        """Recorded in what is written under this lease."""
        return self._held.epoch

    def note(self, *, step: int, total: int) -> None:
        """How far the job is; the next heartbeat tells it."""
        self._progress = (step, total)

    def check(self) -> None:
        """Raises LeaseLost when somebody else has or had the lease since it became ours.

        The store alone decides: one that was not renewed, and that nobody took, is still ours.
        """
        check(self._store, self._held)

    def raise_if_lost(self) -> None:
        """Raises LeaseLost, saying how, when `lost` is set."""
        if self._error is not None:
            raise self._error

    @contextlib.contextmanager
    def keep(self) -> Generator[None]:
        """Renew the lease while the block runs, and give it back at its end."""
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
            if not beating.is_alive():  # else the store hangs; the lease will run out
                with contextlib.suppress(*_UNREACHABLE):
                    release(self._store, self._held)

    def _beat(self) -> None:
        while not self._over.wait(self._terms.beat):
            step, total = self._progress
            try:
                self._held = renew(self._store, self._held, step=step, total=total)
            except LeaseLost as error:
                self._lose(error)
                return
            except _UNREACHABLE:
                continue  # the record decides when it can be read again

    def _watch(self) -> None:
        """Pass on the stop of the run: a heartbeat may hang in the store for minutes."""
        while not self._over.wait(_SECONDS_BETWEEN_LOOKS):
            if self._stop.is_set():
                self.ending.set()
                return

    def _lose(self, error: LeaseLost) -> None:
        self._error = self._error or error
        self.lost.set()
        self.ending.set()


@contextlib.contextmanager
def hold_lease(
    store: Store,
    stage: str,
    fingerprint: str,
    me: Claimant,
    *,
    stop: threading.Event,
    terms: LeaseTimings,
) -> Generator[HeldLease | LeaseHolder]:
    """Hold the lease of a fingerprint if it can be had, while the block runs; else say who has it.

    Does not wait. As for `try_acquire`, the caller holds the fingerprint's kernel lock. What was
    held is given back when the block ends, however it ends.
    """
    found = try_acquire(store, stage, fingerprint, me, ttl=terms.ttl)
    if isinstance(found, LeaseHolder):
        yield found
        return
    lease = HeldLease(store, found, stop=stop, terms=terms)
    with lease.keep():
        yield lease
