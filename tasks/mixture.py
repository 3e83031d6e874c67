"""Several tasks' examples as one list to train on, shuffled by a seed."""

import random
from collections.abc import Sequence

from tasks.base import Conversation, Task


def mixture(tasks: Sequence[tuple[Task, int]], seed: int) -> list[Conversation]:
    """Every example of each (task, epochs) pair `epochs` times, in one seeded random order.

    The order depends on nothing but `seed` and the lengths.
    """
    conversations = [
        example for task, epochs in tasks for _ in range(epochs) for example in task.examples
    ]
    random.Random(seed).shuffle(conversations)
    return conversations
