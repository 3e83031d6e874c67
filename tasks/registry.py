"""The list of tasks, and what can be done with one by name: make examples, grade answers.

To add a task, write a module with a `GeneratedTask` or a `HubTask` and name it here.
"""

from collections.abc import Iterator, Sequence

from tasks import (
    arc,
    arithmetic,
    gsm8k,
    humaneval,
    identity,
    mmlu,
    smoltalk,
    spelling,
    spelling_bee,
)
from tasks.base import Conversation, TaskError, check_split
from tasks.sources import AnyTask, GeneratedTask, HubTask

TASKS: dict[str, AnyTask] = {
    task.name: task
    for task in (
        arithmetic.TASK,
        identity.TASK,
        spelling.TASK,
        spelling_bee.SIMPLE,
        spelling_bee.BEE,
        smoltalk.TASK,
        mmlu.TASK,
        arc.EASY,
        arc.CHALLENGE,
        gsm8k.TASK,
        humaneval.TASK,
    )
}


def task_named(name: str) -> AnyTask:
    """The task called `name`. Raises TaskError for an unknown one."""
    if name not in TASKS:
        raise TaskError(f"there is no task '{name}' (one of: {', '.join(sorted(TASKS))})")
    return TASKS[name]


def generate(
    name: str, split: str, num_examples: int, *, grade: int, seed: int
) -> Iterator[Conversation]:
    """`num_examples` examples of a generated task, or all it has when it is a file with fewer.

    Deterministic in its arguments; asking for fewer gives a prefix. Raises TaskError for an unknown
    task, split or grade, for a task whose examples are a dataset, or when it cannot give so many.
    """
    check_split(split)
    task = task_named(name)
    if not isinstance(task, GeneratedTask):
        raise TaskError(f"examples of {name} are not made but downloaded")
    return task.generate(split, num_examples, grade=grade, seed=seed)


def is_gradable(name: str) -> bool:
    """Whether answers can be right or wrong. Those to a dataset that is no task here cannot."""
    return name in TASKS and TASKS[name].is_correct is not None


def is_correct(name: str, conversation: Conversation, answer: str) -> bool:
    """Whether `answer` is right. Raises TaskError for an unknown task or one without grading."""
    grade = task_named(name).is_correct
    if grade is None:
        raise TaskError(f"answers of task '{name}' cannot be graded")
    return grade(conversation, answer)


def are_correct(name: str, graded: Sequence[tuple[Conversation, str]]) -> list[bool]:
    """Whether each of many answers is right, graded side by side where that takes less time.

    Raises TaskError for an unknown task or one without grading.
    """
    task = task_named(name)
    if isinstance(task, HubTask) and task.are_correct is not None:
        return task.are_correct(graded)
    return [is_correct(name, conversation, answer) for conversation, answer in graded]


def reward(name: str, conversation: Conversation, answer: str) -> float:
    """What reinforcement learning pays for `answer`: 1.0 when it is right, else 0.0."""
    return float(is_correct(name, conversation, answer))
