"""Acquire all that a build needs, or find the artifact that another process made meanwhile.

A build needs three things, acquired in this order: this machine's device (for a GPU stage), this
machine's file lock of the fingerprint, and the lease in the store. If one is unavailable all are
released before the next try, so two builders cannot deadlock.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from flows.leases import file_lock
from flows.leases.held_lease import HeldLease, LeaseTimings, hold_lease
from flows.leases.lease import Claimant, LeaseHolder, Observer, find_holder
from flows.leases.outage import WaitLog, not_reached
from flows.render.text import duration
from infra.launch.torchrun import StageInterrupted
from infra.polling import POLL_SECONDS
from infra.storage.base import Store, StoreUnavailable
from nanochat_core.errors import StoreError


@dataclass(frozen=True, kw_only=True)
class BuildClaim:
    """A request to build one fingerprint, and the callbacks of its owner."""

    ref: ArtifactRef
    store: Store
    lock_path: Path
    device: threading.Semaphore | None  # None: the stage needs none
    claimant: Claimant
    terms: LeaseTimings
    stop: threading.Event  # ends the waiting, and later the job
    find: Callable[[], Manifest | None]  # the artifact, if it exists by now
    log: Callable[[str], None]  # gets a line about the process waited for, at times


@contextlib.contextmanager
def acquire(claim: BuildClaim) -> Generator[HeldLease | Manifest]:
    """Hold device, file lock and lease while the block runs, or yield the artifact if it appears.

    A caller that gets the lease must look for the artifact again: the owner before may have
    published it. Raises StageInterrupted if the run is stopped meanwhile, and StoreError if the
    store refuses at the first contact, or refuses for longer than a lease lives. While the store
    does not answer, this waits without a limit.
    """
    with contextlib.ExitStack() as held:
        yield _wait(claim, held)


def _wait(claim: BuildClaim, held: contextlib.ExitStack) -> HeldLease | Manifest:
    waiting = WaitLog(claim.log, every=claim.terms.say)
    observer = Observer(time.monotonic)
    pause = claim.terms.look
    next_look = time.monotonic()
    reached: float | None = None  # when the store last answered
    away_since: float | None = None
    while True:
        if claim.stop.is_set():
            raise StageInterrupted(f"{claim.ref.stage} was not started: the run is being stopped")
        # What a failed try acquired is released at the end of this block, before the pause.
        with contextlib.ExitStack() as mine:
            is_free_here = _take_here(claim, mine)
            # _take_here has slept: a local lock is polled often, the store seldom.
            if not is_free_here and time.monotonic() < next_look:
                continue
            try:
                found = _ask_store(claim, mine, waiting, observer, is_free_here=is_free_here)
                reached, away_since = time.monotonic(), None
            except StoreUnavailable as error:
                away_since = away_since or time.monotonic()
                waiting.say("store", not_reached(time.monotonic() - away_since, error))
                found = None
            except StoreError:
                # A refusal at the first contact is a wrong setting; a later one may pass.
                if reached is None or time.monotonic() - reached > claim.terms.ttl:
                    raise
                found = None
            if isinstance(found, HeldLease):
                # Hand everything to the caller's stack: `mine` releases nothing any more.
                held.enter_context(mine.pop_all())
            if found is not None:
                return found
        if is_free_here:  # nothing is held in this pause: other stages may use the device
            claim.stop.wait(pause)
        next_look = time.monotonic() + pause
        pause = min(2 * pause, claim.terms.longest_look)


def _take_here(claim: BuildClaim, held: contextlib.ExitStack) -> bool:
    """Acquire device and file lock, waiting POLL_SECONDS at most. Returns False if one is taken."""
    if claim.device is not None:
        if not claim.device.acquire(timeout=POLL_SECONDS):
            return False
        held.callback(claim.device.release)
    if held.enter_context(file_lock.try_hold(claim.lock_path, run=claim.claimant.run)):
        return True
    held.close()  # releases the device before the sleep
    claim.stop.wait(POLL_SECONDS)
    return False


def _ask_store(
    claim: BuildClaim,
    held: contextlib.ExitStack,
    waiting: WaitLog,
    observer: Observer,
    *,
    is_free_here: bool,
) -> HeldLease | Manifest | None:
    """Return the lease if it is free, else the artifact if it exists; else report who builds."""
    store, ref, terms = claim.store, claim.ref, claim.terms
    if is_free_here:
        # The file lock comes before the lease: try_acquire takes over a lease of this home at once
        # because the lock proves that its owner is dead.
        found = held.enter_context(
            hold_lease(store, ref, claim.claimant, stop=claim.stop, terms=terms, observer=observer)
        )
        if isinstance(found, HeldLease):
            return found
        builder = found
    else:
        owner = file_lock.find_owner(claim.lock_path)
        # No owner means that only the device is missing: a lease of this home is a dead process's.
        dead = None if owner else claim.claimant.home
        builder = find_holder(store, ref, ttl=terms.ttl, dead=dead, observer=observer) or owner
    if manifest := claim.find():
        return manifest
    if builder is not None:  # else this waits for the device alone
        waiting.say(*_describe(builder, terms))
    return None


def _describe(
    builder: LeaseHolder | file_lock.Owner, terms: LeaseTimings
) -> tuple[tuple[object, ...], str]:
    """Return who builds and whether it is silent, and the line that says so."""
    # Step and age change with each look, so they are no part of the subject.
    process = builder.record.owner if isinstance(builder, LeaseHolder) else builder
    is_silent = isinstance(builder, LeaseHolder) and builder.silence > terms.ttl / 2
    expiry = f"; its lease expires after {duration(terms.ttl)} without one" if is_silent else ""
    return (process, is_silent), f"waiting: built by {builder}{expiry}"
