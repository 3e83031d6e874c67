"""Acquire a lease, renew it while a job runs, and notice when it is lost.

A lease is lost when its record names another owner, and only then. While the store does not answer
the job continues: no other process may want the lease, and what the job saves on this machine is
not lost by waiting. At the next contact the record decides. An owner that was replaced meanwhile is
kept from publishing by `check`, not by a clock.
"""

import contextlib
import threading
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from flows.identity.ref import ArtifactRef
from flows.leases.lease import BEAT, TTL, Lease, LeaseHolder, Observer, observe
from infra.polling import MARGIN_SECONDS
from infra.storage.base import Store, swap_until_won
from nanochat_core.errors import ArtifactError, StageError, StoreError

_UNREACHABLE = (StoreError, ArtifactError)  # a damaged answer decides as little as none


class LeaseLost(StageError):
    """The lease is lost; another process may be building. What this one saved is resumed later."""


@dataclass(frozen=True, kw_only=True)
class LeaseTimings:
    """Intervals and limits around a lease, in seconds."""

    ttl: float = TTL
    beat: float = BEAT
    poll: float = 1.0  # between the first polls of the store while waiting; backs off from there
    max_poll: float = 5.0
    report: float = 30.0  # between two log lines about the same owner
    meet: float = 600.0  # limit for the first rendezvous of the nodes of a stage


class HeldLease:
    """A lease that this process holds until it is lost or released; see `try_acquire`."""

    def __init__(self, store: Store, ref: ArtifactRef, record: Lease) -> None:
        self.record = record  # as of the last write
        self.lost: LeaseLost | None = None  # the reason, once a heartbeat has found it lost
        self._store = store
        self._ref = ref
        self._noted: dict[str, Any] = {"step": record.step, "total": record.total}

    def note(self, **facts: int | str) -> None:
        """Note the job's `step` and `total`, or its `endpoint`: each later renewal records them."""
        # One assignment: the heartbeat thread never pairs an old step with a new total.
        self._noted = {**self._noted, **facts}

    def renew(self) -> None:
        """Renew the lease and record what was noted. Raises LeaseLost."""
        self._write(**self._noted)

    def release(self) -> None:
        """Release the lease, so that the next owner need not wait. No-op if it is lost."""
        with contextlib.suppress(LeaseLost):
            self._write(released=True)

    def check(self) -> None:
        """Read the record. Raises LeaseLost if another process has acquired the lease since.

        The store alone decides: a lease that expired, and that no process took over, is still ours.
        """
        self._read()

    def raise_if_lost(self) -> None:
        """Raise LeaseLost, with the reason, if a heartbeat found the lease lost."""
        if self.lost is not None:
            raise self.lost

    @contextlib.contextmanager
    def keep(self, *, beat: float) -> Generator[None]:
        """Renew the lease every `beat` seconds while the block runs, and release it at its end."""
        finished = threading.Event()
        heartbeat = partial(self._beat, finished, beat)
        beating = threading.Thread(target=heartbeat, name="heartbeat", daemon=True)
        beating.start()
        try:
            yield
        finally:
            finished.set()
            beating.join(MARGIN_SECONDS)  # its request may be under way
            # A heartbeat that still hangs in the store could interfere with the release; then the
            # lease is left to expire.
            if not beating.is_alive():
                with contextlib.suppress(*_UNREACHABLE):
                    self.release()

    def _beat(self, finished: threading.Event, seconds: float) -> None:
        while not finished.wait(seconds):
            try:
                self.renew()
            except LeaseLost as error:
                self.lost = error
                return
            except _UNREACHABLE:
                continue  # the record decides when it can be read again

    def _write(self, **changes: Any) -> None:
        def swap() -> Lease | None:
            stored = self._read()
            # From the stored record: an earlier renewal whose answer was lost counts.
            new = replace(stored.record, beat=stored.record.beat + 1, **changes)
            is_ours = self._store.put_if_same(
                self._ref.lease_key, new.to_json(), version=stored.version
            )
            return new if is_ours else None

        self.record = swap_until_won(f"{self._store.url}/{self._ref.lease_key}", swap)

    def _read(self) -> LeaseHolder:
        """Return the stored record if it still names this owner and epoch. Raises LeaseLost."""
        found = observe(self._store, self._ref, None)
        if found is None:
            raise self._error(": its record was removed")
        if not self._is_of(found.record):
            raise self._error(f" to {found}")
        if found.record.released:
            raise self._error(": it was released")
        return found

    def _is_of(self, record: Lease) -> bool:
        # The epoch too: the same claim may acquire the lease again after it was released.
        return (record.owner, record.epoch) == (self.record.owner, self.record.epoch)

    def _error(self, how: str) -> LeaseLost:
        return LeaseLost(
            f"{self._ref.name} lost its lease{how}",
            hint="if the run does not retry by itself, run the same command again: it waits for "
            "the current builder and uses its artifact",
        )


def try_acquire(
    store: Store,
    ref: ArtifactRef,
    claim: Lease,
    *,
    ttl: float = inf,
    observer: Observer | None = None,
) -> HeldLease | LeaseHolder:
    """Return the lease if it could be acquired, else its holder. Does not wait.

    A caller that tries repeatedly passes the same `observer` each time. Without one `ttl` is an age
    by the store's clock: an hour at least, so that a live lease is hardly taken for an old one.

    Idempotent: after an error it may be repeated with the same claim, and finds a lease whose grant
    got no answer. Raises StoreError.
    """
    key = ref.lease_key

    def swap() -> HeldLease | LeaseHolder | None:
        found, mine = observe(store, ref, observer), claim
        if found is None:
            is_ours = store.put_if_absent(key, mine.to_json())
        # Our own claim: no answer said that it is ours.
        elif not found.has_ended(ttl) and found.record.owner != claim.owner:
            return found
        else:
            mine = replace(claim, epoch=found.record.epoch + 1)
            # On the version that was just read: of two processes that take over, one succeeds.
            is_ours = store.put_if_same(key, mine.to_json(), version=found.version)
        return HeldLease(store, ref, mine) if is_ours else None

    return swap_until_won(f"{store.url}/{key}", swap)
