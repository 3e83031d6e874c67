"""Use a task by its name: generate examples, grade answers.

`tasks.names` finds the tasks; a module is imported when its task is first used.
"""

from collections.abc import Iterator, Sequence

from tasks import plugins
from tasks.base import Conversation, TaskError, check_split, text_of
from tasks.kinds.sources import AnyTask, GeneratedTask, Grader, HubTask
from tasks.names import GRADERS, TASKS, all_names, references_of


def _is_expected(conversation: Conversation, answer: str) -> bool:
    expected = text_of(conversation["messages"][-1]["content"])
    return answer.strip().lower() == expected.strip().lower()


_OWN_FILE = Grader(is_correct=_is_expected, baseline=0.0)


def task_named(name: str) -> AnyTask:
    """Return the task called `name`. Raises TaskError for an unknown one.

    Also raises TaskError if two installed packages have a task of this name, and if the module of
    one cannot be imported or has something else under its name.
    """
    references = references_of(name)
    if not references:
        raise TaskError(f"there is no task '{name}' (one of: {', '.join(all_names())})")
    if name in TASKS:
        task: AnyTask = plugins.load(references[0])
        assert task.name == name, f"{references[0]} is task '{task.name}', not '{name}'"
        return task
    task = plugins.load_one(references, (GeneratedTask, HubTask), f"task '{name}'")
    if task.name != name:
        raise TaskError(f"{references[0]} is task '{task.name}', its package calls it '{name}'")
    return task


def find_grader(name: str) -> Grader | None:
    """Return the grader of a task, or None if its answers are neither right nor wrong.

    An answer to a dataset that is not a task, a file of a user's own, is right if it is the
    expected one, apart from case and outer white space.
    """
    if name in GRADERS:
        return plugins.load(GRADERS[name])
    return task_named(name).grader if references_of(name) else _OWN_FILE


def grader_of(name: str) -> Grader:
    """Return the grader of a task or dataset. Raises TaskError for a task without grading."""
    grader = find_grader(name)
    if grader is None:
        raise TaskError(f"answers of task '{name}' cannot be graded")
    return grader


def generate(
    name: str, split: str, num_examples: int, *, grade: int, seed: int
) -> Iterator[Conversation]:
    """Yield `num_examples` examples of a generated task, or all if it is a file with fewer.

    Deterministic in its arguments; a smaller number gives a prefix. Raises TaskError for an unknown
    task, split or grade, for a task whose examples are a dataset, or if there are too few.
    """
    check_split(split)
    task = task_named(name)
    if not isinstance(task, GeneratedTask):
        raise TaskError(f"examples of {name} are not made but downloaded")
    return task.generate(split, num_examples, grade=grade, seed=seed)


def has_choices(name: str) -> bool:
    """Return whether guessing may answer a task: its questions have lettered choices."""
    return grader_of(name).baseline > 0


def is_gradable(name: str) -> bool:
    """Return whether answers can be right or wrong."""
    return name in GRADERS or find_grader(name) is not None


def are_correct(name: str, graded: Sequence[tuple[Conversation, str]]) -> list[bool]:
    """Return whether each of many answers is right; graded in parallel if the grader can.

    Raises TaskError as `grader_of` does, and if this machine cannot grade.
    """
    grader = grader_of(name)
    if grader.are_correct is not None:
        return grader.are_correct(graded)
    return [grader.is_correct(conversation, answer) for conversation, answer in graded]
