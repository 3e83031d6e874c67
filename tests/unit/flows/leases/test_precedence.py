"""One device: the least rank of those who wait is the next, and nobody waits for who has gone."""

import threading
from types import SimpleNamespace

import pytest

from flows.leases import queue as module
from flows.leases.queue import PriorityQueue, QueueEntry


def test_the_waiter_of_the_least_rank_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS_TO_ASK_AGAIN", 1000.0)  # a thread may be slow
    queue, had, ready = PriorityQueue(), list[int](), threading.Barrier(4)
    first = QueueEntry(queue=queue, rank=0)
    assert first.acquire(timeout=0)

    def wait_for_it(rank: int) -> None:
        place = QueueEntry(queue=queue, rank=rank)
        place.acquire(timeout=0)  # it has asked once
        ready.wait()
        while not place.acquire(timeout=0.05):  # as a stage does, again and again
            pass
        had.append(rank)
        place.release()

    threads = [threading.Thread(target=wait_for_it, args=(rank,)) for rank in (3, 1, 2)]
    for thread in threads:
        thread.start()
    ready.wait()
    first.release()
    for thread in threads:
        thread.join()
    assert had == [1, 2, 3]


def test_a_withdrawn_request_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    queue = PriorityQueue()
    holder = QueueEntry(queue=queue, rank=0)
    assert holder.acquire(timeout=0)
    assert not QueueEntry(queue=queue, rank=1).acquire(timeout=0)  # it asked once, and went
    holder.release()

    now[0] = 2.9
    assert not QueueEntry(queue=queue, rank=2).acquire(timeout=0)
    now[0] = 3.1
    assert QueueEntry(queue=queue, rank=2).acquire(timeout=0)
