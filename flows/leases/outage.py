"""Retry while the store does not answer, instead of giving up work that is on this machine's disk.

No process can take a lease over through a store that none reaches, and what another process does
through a store that it alone reaches is found at the next contact. So there is no limit: the wait
ends when the store answers, when the run is stopped, or when the lease is found lost.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from flows.leases.held_lease import LeaseTimings
from flows.render.text import duration
from infra.launch.torchrun import StageInterrupted
from infra.retry import NoAnswer, RetryPolicy, until_answered
from infra.storage.base import Store, StoreUnavailable

T = TypeVar("T")


class WaitLog:
    """Lines about what is waited for: one when that changes, else one at intervals. Thread-safe."""

    def __init__(self, log: Callable[[str], None], *, every: float) -> None:
        self._log = log
        self._every = every  # seconds
        self._lock = threading.Lock()
        self._subject: object = None  # of the last line
        self._next = 0.0

    def report(self, subject: object, text: str) -> None:
        """Log `text`, unless a line about the same subject was the last and is recent."""
        now = time.monotonic()
        with self._lock:
            if subject == self._subject and now < self._next:
                return
            self._subject, self._next = subject, now + self._every
        self._log(text)


@dataclass(frozen=True, kw_only=True)
class StoreWait:
    """A retry loop for requests without an answer, for a run or a stage. Safe for many threads."""

    store: Store
    name: str  # of the run or the stage, for errors
    waiting: WaitLog  # one for all threads: they all wait for the same store
    stop: threading.Event
    terms: LeaseTimings
    check: Callable[[], None] = lambda: None

    def __call__(self, action: Callable[[], T], /) -> T:
        """Return what `action` returns; while it raises StoreUnavailable, wait and call it again.

        The action must be idempotent: a request without an answer may have been carried out. An
        action that decides anything must check the lease again within itself, on each try.
        Raises StageInterrupted if the run is stopped, and what `check` raises between two tries.
        """

        failed: list[float] = []  # when; the action may have worked for long before

        def report(failure: NoAnswer) -> None:
            failed.append(time.monotonic())
            away = duration(round(failed[-1] - failed[0]))
            self.waiting.report("store", f"waiting: store not reached for {away} ({failure.error})")

        def wait(seconds: float) -> None:
            if self.stop.wait(seconds):
                raise StageInterrupted(
                    f"{self.name} was stopped while it waited for {self.store.url}",
                    hint="run the same command again: what is on this machine is used again",
                )
            # Another thread may have reached the store meanwhile and found the lease lost.
            self.check()

        policy = RetryPolicy(first_wait=self.terms.poll, longest_wait=self.terms.max_poll)
        return until_answered(action, StoreUnavailable, policy=policy, on_failure=report, wait=wait)
