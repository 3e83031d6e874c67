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
from functools import partial
from pathlib import Path

from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from flows.leases import file_lock
from flows.leases.held_lease import HeldLease, try_acquire
from flows.leases.lease import Lease, LeaseHolder, Observer, find_holder
from flows.leases.outage import StoreWait
from flows.render.text import duration
from infra.launch.torchrun import StageInterrupted
from infra.polling import POLL_SECONDS
from nanochat_core.errors import StoreError


@dataclass(frozen=True, kw_only=True)
class BuildClaim:
    """A request to build one fingerprint, and what its owner waits with."""

    ref: ArtifactRef
    lease: Lease  # the record to write
    lock_path: Path
    device: threading.Semaphore | None  # None: the stage needs none
    find: Callable[[], Manifest | None]  # the artifact, if it exists by now
    wait: StoreWait


@contextlib.contextmanager
def acquire(claim: BuildClaim) -> Generator[HeldLease | Manifest]:
    """Hold device, file lock and lease while the block runs, or yield the artifact if it appears.

    A caller that gets the lease must look for the artifact again: the owner before may have
    published it. Raises StageInterrupted if the run is stopped meanwhile, and StoreError if the
    store refuses at the first contact, or for longer than a lease lives. While the store does not
    answer, this waits without a limit.
    """
    observer, wait = Observer(time.monotonic), claim.wait
    pause = wait.terms.poll
    next_poll = time.monotonic()
    reached: float | None = None  # when the store last answered
    while True:
        if wait.stop.is_set():
            raise StageInterrupted(f"{claim.ref.stage} was not started: the run is being stopped")
        # What a failed try acquired is released at the end of this block, before the pause.
        with contextlib.ExitStack() as held:
            is_free_here = _take_here(claim, held)
            # _take_here has slept: a local lock is polled often, the store seldom.
            if not is_free_here and time.monotonic() < next_poll:
                continue
            try:
                found = wait(partial(_ask_store, claim, observer, is_free_here=is_free_here))
                reached = time.monotonic()
            except StoreError:
                # A refusal at the first contact is a wrong setting; a later one may pass.
                if reached is None or time.monotonic() - reached > wait.terms.ttl:
                    raise
                found = None
            if isinstance(found, LeaseHolder):
                _report(found, wait)
            elif found is not None:  # else this waits for the device alone
                if isinstance(found, HeldLease):
                    held.enter_context(found.keep(beat=wait.terms.beat))
                else:
                    held.close()
                yield found
                return
        if is_free_here:  # nothing is held in this pause: other stages may use the device
            wait.stop.wait(pause)
        next_poll = time.monotonic() + pause
        pause = min(2 * pause, wait.terms.max_poll)


def _take_here(claim: BuildClaim, held: contextlib.ExitStack) -> bool:
    """Acquire device and file lock, waiting POLL_SECONDS at most. Returns False if one is taken."""
    if claim.device is not None:
        if not claim.device.acquire(timeout=POLL_SECONDS):
            return False
        held.callback(claim.device.release)
    if held.enter_context(file_lock.try_hold(claim.lock_path)):
        return True
    held.close()  # releases the device before the sleep
    claim.wait.stop.wait(POLL_SECONDS)
    return False


def _ask_store(
    claim: BuildClaim, observer: Observer, *, is_free_here: bool
) -> HeldLease | Manifest | LeaseHolder | None:
    """Return the lease if it is free, else the artifact if it exists, else who builds."""
    store, ref, ttl = claim.wait.store, claim.ref, claim.wait.terms.ttl
    if is_free_here:
        found = try_acquire(store, ref, claim.lease, ttl=ttl, observer=observer)
    else:
        found = find_holder(store, ref, ttl=ttl, observer=observer)
    return found if isinstance(found, HeldLease) else claim.find() or found


def _report(builder: LeaseHolder, wait: StoreWait) -> None:
    """Log who builds: at once if that changes or the builder falls silent, else at times."""
    is_silent = builder.silence > wait.terms.ttl / 2
    text = f"waiting: built by {builder}"
    if is_silent:
        text += f"; its lease expires after {duration(wait.terms.ttl)} without one"
    # Step and age change with each poll, so they are no part of the subject.
    wait.waiting.report((builder.record.owner, is_silent), text)
