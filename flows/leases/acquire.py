"""Waits until this process may build a fingerprint, or need not: somebody else has made it.

To build takes three things, asked for in this order and all given back while one is missing: this
machine's device (for a GPU stage), this machine's lock of the fingerprint, and the store's lease.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from flows.identity.manifest import Manifest
from flows.leases import file_lock
from flows.leases.held_lease import HeldLease, LeaseTimings, hold_lease
from flows.leases.lease import Claimant, LeaseHolder, find_holder
from flows.leases.outage import not_reached
from flows.leases.queue import DeviceSlot
from infra.launch.torchrun import StageInterrupted
from infra.storage.base import Store, StoreUnavailable
from nanochat_core.errors import StoreError

_SECONDS_BETWEEN_TRIES = 0.2  # for what this machine gives without asking the store
_SLOWING = 1.5

Tell: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class BuildClaim:
    """What is asked for, and by whom."""

    stage: str
    fingerprint: str
    store: Store
    lock_path: Path
    device: DeviceSlot | None  # None: the stage needs none
    claim: Claimant
    terms: LeaseTimings
    stop: threading.Event  # ends the waiting, and later the job
    find: Callable[[], Manifest | None]  # the artifact, when it need not be built any more
    tell: Tell  # is told whom one waits for, now and again


@contextlib.contextmanager
def acquire(turn: BuildClaim) -> Generator[HeldLease | Manifest]:
    """Hold all that is needed to build while the block runs; or give what was built meanwhile.

    Whoever got the lease looks for the artifact again: the owner before may have made it. Raises
    StageInterrupted when the run is stopped while it waits, and StoreError when the store refuses
    at first, or for as long as a lease lives. A store that does not answer is waited for.
    """
    with contextlib.ExitStack() as held:
        yield _wait(turn, held)


def _wait(turn: BuildClaim, held: contextlib.ExitStack) -> HeldLease | Manifest:
    words = _WaitReporter(turn)
    pause = turn.terms.look
    next_look = time.monotonic()
    reached: float | None = None  # when the store last answered
    away_since: float | None = None
    while True:
        if turn.stop.is_set():
            raise StageInterrupted(f"{turn.stage} was not started: the run is being stopped")
        with contextlib.ExitStack() as mine:
            is_free_here = _take_here(turn, mine)
            if not is_free_here and time.monotonic() < next_look:
                continue
            try:
                found = _ask_store(turn, mine, words, is_free_here=is_free_here)
                reached, away_since = time.monotonic(), None
            except StoreUnavailable as error:
                away_since = away_since or time.monotonic()
                words.say_away(time.monotonic() - away_since, error)
                found = None
            except StoreError:
                if reached is None or time.monotonic() - reached > turn.terms.ttl:
                    raise
                found = None
            if isinstance(found, HeldLease):
                held.enter_context(mine.pop_all())
            if found is not None:
                return found
        if is_free_here:
            turn.stop.wait(pause)
        next_look = time.monotonic() + pause
        pause = min(pause * _SLOWING, turn.terms.longest_look)


def _take_here(turn: BuildClaim, held: contextlib.ExitStack) -> bool:
    """Take what this machine gives. When it is taken already, wait a moment; whether we have it."""
    if turn.device is not None:
        if not turn.device.acquire(timeout=_SECONDS_BETWEEN_TRIES):
            return False
        held.callback(turn.device.release)
    if held.enter_context(file_lock.try_hold(turn.lock_path)):
        return True
    held.close()
    turn.stop.wait(_SECONDS_BETWEEN_TRIES)
    return False


def _ask_store(
    turn: BuildClaim, held: contextlib.ExitStack, words: "_WaitReporter", *, is_free_here: bool
) -> HeldLease | Manifest | None:
    """The lease if it can be had, else the artifact if it has appeared; else say who builds."""
    store, stage, fingerprint, terms = turn.store, turn.stage, turn.fingerprint, turn.terms
    if is_free_here:
        found = held.enter_context(
            hold_lease(store, stage, fingerprint, turn.claim, stop=turn.stop, terms=terms)
        )
        if isinstance(found, HeldLease):
            return found
        builder = found
    else:
        owner = file_lock.find_owner(turn.lock_path)
        dead = None if owner else turn.claim.home
        builder = find_holder(store, stage, fingerprint, ttl=terms.ttl, dead=dead) or owner
    if manifest := turn.find():
        return manifest
    if builder is not None:  # else the device is what we wait for
        words.say(builder)
    return None


class _WaitReporter:
    """Says whom one waits for: when that changes, when he falls silent, and now and again."""

    def __init__(self, turn: BuildClaim) -> None:
        self._tell = turn.tell
        self._terms = turn.terms
        self._said: tuple[str, int, bool] | None = None
        self._when = 0.0

    def say(self, builder: LeaseHolder | file_lock.Owner) -> None:
        """Say it, unless it was said just before."""
        now = time.monotonic()
        is_silent = isinstance(builder, LeaseHolder) and builder.age > self._terms.ttl / 2
        said = (builder.host, builder.pid, is_silent)
        if said != self._said or now - self._when >= self._terms.say:
            self._said, self._when = said, now
            after = f"; taken over after {self._terms.ttl:g} s without one" if is_silent else ""
            self._tell(f"waiting: built by {builder}{after}")

    def say_away(self, seconds: float, error: StoreUnavailable) -> None:
        """Say that the store does not answer, unless it was said just before."""
        now = time.monotonic()
        if self._said is not None or now - self._when >= self._terms.say or not seconds:
            self._said, self._when = None, now
            self._tell(not_reached(seconds, error))
