"""Waits for a store that does not answer, instead of giving up work that is on this machine's disk.

A lease cannot be taken over through a store that no process reaches, and what another process does
through one that it reaches is found at the next contact. So there is no limit: the wait ends when
the store answers, when the run is stopped, or when the lease is known to be lost.
"""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from flows.site import Site
from infra.launch.torchrun import StageInterrupted
from infra.storage.base import StoreAway

_GROWTH = 1.5

T = TypeVar("T")


class StoreWait:
    """Repeats what the store did not answer, for one stage of a run. For any number of threads."""

    def __init__(self, site: Site, stage: str, *, check: Callable[[], None] = lambda: None) -> None:
        self._site = site
        self._stage = stage
        self._check = check
        self._lock = threading.Lock()
        self._next_report = 0.0

    def __call__(self, action: Callable[[], T], /) -> T:
        """Return what `action` returns; while it raises StoreAway, wait and call it again.

        The action must be safe to repeat: whether the store carried out a request that it did not
        answer is unknown. What decides anything asks for the lease again within the action.
        Raises StageInterrupted if the run is stopped, and what `check` raises between two tries.
        """
        terms = self._site.terms
        pause = terms.look
        began: float | None = None
        while True:
            try:
                return action()
            except StoreAway as error:
                began = time.monotonic() if began is None else began
                self._report(time.monotonic() - began, error)
                if self._site.stop.wait(pause):
                    raise StageInterrupted(
                        f"{self._stage} was stopped while it waited for {self._site.store.url}",
                        hint="run the same command again: what is on this machine is used again",
                    ) from error
            self._check()
            pause = min(pause * _GROWTH, terms.longest_look)

    def _report(self, seconds: float, error: StoreAway) -> None:
        now = time.monotonic()
        with self._lock:
            if now < self._next_report:
                return
            self._next_report = now + self._site.terms.say
        self._site.watch(self._stage, {"kind": "waiting", "text": not_reached(seconds, error)})


def not_reached(seconds: float, error: StoreAway) -> str:
    """Return the line that says for how long a store has not answered, and what it was asked."""
    return f"waiting: store not reached for {seconds:.0f} s ({error})"
