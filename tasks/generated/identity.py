"""Conversations about the model's identity, handwritten, in `identity.jsonl` next to this file.

Each line also has its `split`: test conversations rephrase the questions of training ones. Answers
are not graded.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tasks.base import Conversation, check_split
from tasks.kinds.sources import GeneratedTask

NAME = "identity"


def generate(split: str, num_examples: int, *, grade: int, seed: int) -> Iterator[Conversation]:
    """Yield at most `num_examples` conversations of a split in a seeded order, each once.

    The file has about 80 for training and 16 for testing. There is one grade; `grade` is ignored.
    """
    check_split(split)
    lines = Path(__file__).with_name("identity.jsonl").read_text(encoding="ascii").splitlines()
    examples = [example for line in lines if (example := json.loads(line))["split"] == split]
    # Shuffled whole, then cut: a smaller number of examples is a prefix.
    random.Random(seed).shuffle(examples)
    for example in examples[:num_examples]:
        yield {"messages": example["messages"]}


TASK = GeneratedTask(name=NAME, generate=generate, grader=None)
