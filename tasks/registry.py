"""The list of tasks, and what can be done with one by name: make examples, keep them, grade.

To add a task, write a module with NAME, GRADABLE, `generate` and `is_correct`, and name it here.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from tasks import arithmetic, identity, spelling
from tasks.base import Conversation, Task, TaskError, check_conversation, check_split


class TaskModule(Protocol):
    """What a task's module offers."""

    @property
    def NAME(self) -> str:
        """What the task is called: its directory and its name in a config."""
        ...

    @property
    def GRADABLE(self) -> bool:
        """Whether an answer can be right or wrong."""
        ...

    def generate(
        self, split: str, num_examples: int, *, grade: int, seed: int
    ) -> Iterator[Conversation]:
        """Examples of a split, the same for the same arguments; fewer asked for is a prefix."""
        ...

    def is_correct(self, conversation: Conversation, answer: str) -> bool:
        """Whether `answer` (text, calls as `<<expression=result>>`) answers the conversation."""
        ...


TASKS: dict[str, TaskModule] = {
    arithmetic.NAME: arithmetic,
    identity.NAME: identity,
    spelling.NAME: spelling,
}


def task_module(name: str) -> TaskModule:
    """The module of the task called `name`. Raises TaskError for an unknown one."""
    if name not in TASKS:
        raise TaskError(f"there is no task '{name}' (one of: {', '.join(sorted(TASKS))})")
    return TASKS[name]


def generate(
    name: str, split: str, num_examples: int, *, grade: int, seed: int
) -> Iterator[Conversation]:
    """`num_examples` examples of a task, or all it has when its dataset is a file with fewer.

    Deterministic in its arguments; asking for fewer gives a prefix. No test example asks what a
    train example asks, whatever the seeds. Raises TaskError for an unknown task, split or grade, or
    when a generated task cannot give so many different examples.
    """
    check_split(split)
    return task_module(name).generate(split, num_examples, grade=grade, seed=seed)


def is_gradable(name: str) -> bool:
    """Whether the task's answers can be right or wrong. Raises TaskError for an unknown task."""
    return task_module(name).GRADABLE


def is_correct(name: str, conversation: Conversation, answer: str) -> bool:
    """Whether `answer` is right. Raises TaskError for an unknown task or one without grading."""
    return task_module(name).is_correct(conversation, answer)


def reward(name: str, conversation: Conversation, answer: str) -> float:
    """What reinforcement learning pays for `answer`: 1.0 when it is right, else 0.0."""
    return float(is_correct(name, conversation, answer))


def write_examples(path: Path, conversations: Iterable[Conversation]) -> int:
    """Write one JSON object a line, ASCII, keys in the order given; returns how many."""
    count = 0
    with path.open("w", encoding="ascii", newline="\n") as file:
        for conversation in conversations:
            file.write(json.dumps(conversation, allow_nan=False) + "\n")
            count += 1
    return count


def open_task(name: str, directory: Path, split: str) -> Task:
    """Read `directory/{name}/{split}.jsonl`.

    Raises TaskError naming the file, and the line where one is no conversation.
    """
    check_split(split)
    task_module(name)
    return Task(
        name=name, split=split, examples=tuple(read_examples(directory / name / f"{split}.jsonl"))
    )


def read_examples(path: Path) -> Iterator[Conversation]:
    """The conversations of a JSONL file, checked. Raises TaskError naming `path:line`."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            conversation = json.loads(line.decode("utf-8"))
            check_conversation(conversation)
        except TaskError as error:
            raise TaskError(f"{path}:{number}: {error}") from error
        except ValueError as error:
            raise TaskError(f"{path}:{number}: not JSON: {error}") from error
        yield conversation
