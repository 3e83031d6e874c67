"""Retry while the store does not answer, instead of giving up work that is on this machine's disk.

No process can take a lease over through a store that none reaches, and what another process does
through a store that it alone reaches is found at the next contact. So there is no limit: the wait
ends when the store answers, when the run is stopped, or when the lease is found lost.
"""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from flows.leases.held_lease import LeaseTimings
from flows.render.text import duration
from infra.launch.torchrun import StageInterrupted
from infra.storage.base import Store, StoreUnavailable

_GROWTH = 1.5  # backoff factor between two tries

T = TypeVar("T")


class WaitLog:
    """Lines about what is waited for: one when that changes, else one at intervals. Thread-safe."""

    def __init__(self, log: Callable[[str], None], *, every: float) -> None:
        self._log = log
        self._every = every  # seconds
        self._lock = threading.Lock()
        self._subject: object = None  # of the last line
        self._next = 0.0

    def say(self, subject: object, text: str) -> None:
        """Log `text`, unless a line about the same subject was the last and is recent."""
        now = time.monotonic()
        with self._lock:
            if subject == self._subject and now < self._next:
                return
            self._subject, self._next = subject, now + self._every
        self._log(text)


class StoreWait:
    """A retry loop for requests without an answer, for a run or a stage. Safe for many threads."""

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        report: Callable[[str], None],
        stop: threading.Event,
        terms: LeaseTimings,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._name = name
        # One line per interval for all threads: they all wait for the same store.
        self._waiting = WaitLog(report, every=terms.say)
        self._stop = stop
        self._terms = terms
        self._check = check

    def __call__(self, action: Callable[[], T], /) -> T:
        """Return what `action` returns; while it raises StoreUnavailable, wait and call it again.

        The action must be idempotent: a request without an answer may have been carried out. An
        action that decides anything must check the lease again within itself, on each try.
        Raises StageInterrupted if the run is stopped, and what `check` raises between two tries.
        """
        pause = self._terms.look
        began: float | None = None
        while True:
            try:
                return action()
            except StoreUnavailable as error:
                began = time.monotonic() if began is None else began
                self._waiting.say("store", not_reached(time.monotonic() - began, error))
                if self._stop.wait(pause):
                    raise StageInterrupted(
                        f"{self._name} was stopped while it waited for {self._store.url}",
                        hint="run the same command again: what is on this machine is used again",
                    ) from error
            # Another thread may have reached the store meanwhile and found the lease lost.
            self._check()
            pause = min(pause * _GROWTH, self._terms.longest_look)


def not_reached(seconds: float, error: StoreUnavailable) -> str:
    """Return the line that says for how long a store has not answered, and what it was asked."""
    return f"waiting: store not reached for {duration(round(seconds))} ({error})"
