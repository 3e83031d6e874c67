"""Combine several tasks' examples into one list: shuffled by a seed, or task after task."""

import random
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from tasks.base import Conversation, Conversations, Task, View


class Joined(Conversations):
    """The conversations of several sequences, concatenated."""

    def __init__(self, parts: Sequence[Sequence[Conversation]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, index: int) -> Conversation:
        """Return one conversation."""
        place = range(len(self))[index]
        # The first part that ends after the place.
        part = bisect_right(self._ends, place)
        return self._parts[part][place - self._ends[part] + len(self._parts[part])]


def mixture(tasks: Sequence[tuple[Task, int]], seed: int) -> View:
    """Return every example of each (task, epochs) pair `epochs` times, in one seeded random order.

    The order depends only on `seed` and the lengths.
    """
    joined = sequence(tasks)
    places = array("q", range(len(joined)))  # 8 bytes per example: there may be millions
    # Indices are shuffled, not examples, which stay in their files until they are read.
    random.Random(seed).shuffle(places)
    return View(joined, places)


def sequence(tasks: Sequence[tuple[Task, int]]) -> Joined:
    """Return every example of each (task, epochs) pair `epochs` times, task after task."""
    return Joined([task.examples for task, epochs in tasks for _ in range(epochs)])
