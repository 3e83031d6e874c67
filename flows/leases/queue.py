"""A machine's device for GPU stages: one at a time, and of those that wait a chosen one first."""

import threading
import time
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Rank: TypeAlias = tuple[int, ...]
_SECONDS_TO_ASK_AGAIN = 3.0  # who has not by then does not want it any more


class DeviceSlot(Protocol):
    """What one stage has at a time. A semaphore is one: it is given to anybody who waits."""

    def acquire(self, *, timeout: float) -> bool:
        """Take it; False when it is still taken after so many seconds."""
        ...

    def release(self) -> None:
        """Give it back."""
        ...


class PriorityQueue:
    """One device for several who wait for it, each with a rank: the least one is the next."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: dict[Rank, float] = {}  # when those who wait asked last
        self._is_taken = False

    def take(self, rank: Rank, *, timeout: float) -> bool:
        """Take the device when it is free and no lesser rank waits; False when time is over."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                now = time.monotonic()
                self._asked[rank] = now
                if not self._is_taken and rank == min(self._waiting(now)):
                    self._is_taken = True
                    del self._asked[rank]
                    return True
                if now >= deadline:
                    return False
                self._changed.wait(deadline - now)

    def give_back(self) -> None:
        """Let the next one have it."""
        with self._changed:
            self._is_taken = False
            self._changed.notify_all()

    def _waiting(self, now: float) -> list[Rank]:
        return [r for r, when in self._asked.items() if now - when < _SECONDS_TO_ASK_AGAIN]


@dataclass(frozen=True, kw_only=True)
class QueueEntry:
    """A device as one of those who wait sees it."""

    queue: PriorityQueue
    rank: Rank

    def acquire(self, *, timeout: float) -> bool:
        """See Device."""
        return self.queue.take(self.rank, timeout=timeout)

    def release(self) -> None:
        """See Device."""
        self.queue.give_back()
