"""A priority queue for a machine's device: one GPU stage at a time, the lowest rank first."""

import threading
import time
from dataclasses import dataclass
from typing import TypeAlias

# Callers poll with short timeouts and may stop doing so. A waiter that has not polled for so many
# seconds no longer holds back those of a higher rank.
_SECONDS_TO_ASK_AGAIN = 3.0


class PriorityQueue:
    """One device and those that wait for it, each with a rank: the lowest rank is next."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: dict[int, float] = {}  # time.monotonic() of each waiter's last poll
        self._is_taken = False

    def take(self, rank: int, *, timeout: float) -> bool:
        """Acquire the device once it is free and no lower rank waits. Returns False on timeout."""
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
                    return False  # its poll stays noted: between two polls it keeps its place
                self._changed.wait(deadline - now)

    def give_back(self) -> None:
        """Release the device and wake all that wait: each checks whether it is next."""
        with self._changed:
            self._is_taken = False
            self._changed.notify_all()

    def _waiting(self, now: float) -> list[int]:
        return [r for r, when in self._asked.items() if now - when < _SECONDS_TO_ASK_AGAIN]


@dataclass(frozen=True, kw_only=True)
class QueueEntry:
    """The device of a PriorityQueue as one waiter sees it, with the waiter's rank."""

    queue: PriorityQueue
    rank: int

    def acquire(self, *, timeout: float) -> bool:
        """Acquire the device. Returns False if it is still taken after `timeout` seconds."""
        return self.queue.take(self.rank, timeout=timeout)

    def release(self) -> None:
        """Release the device."""
        self.queue.give_back()


DeviceSlot: TypeAlias = threading.Semaphore | QueueEntry  # the former: without priorities
