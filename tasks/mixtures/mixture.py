"""Combine several tasks' examples into one list: shuffled by a seed, or task after task."""

import random
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import overload

from tasks.base import Conversation, Task, View


class Joined(Sequence[Conversation]):
    """The conversations of several sequences, concatenated; each read on access."""

    def __init__(self, parts: Sequence[Sequence[Conversation]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Conversation: ...
    @overload
    def __getitem__(self, index: slice) -> View: ...
    def __getitem__(self, index: int | slice) -> Conversation | View:
        """Return one conversation, or a view of a part."""
        places = range(len(self))[index]
        if isinstance(places, range):
            return View(self, places)
        # The first part that ends after the index.
        part = bisect_right(self._ends, places)
        return self._parts[part][places - self._ends[part] + len(self._parts[part])]


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
