"""Read the examples that stage `task_data` prepared, with this package's errors."""

from pathlib import Path

from nanochat_core.errors import DataError
from tasks.base import Task
from tasks.kinds import files


def open_task(name: str, directory: Path, split: str) -> Task:
    """Open a split ("train" or "test") of the task `name` in an artifact of `task_data`.

    Raises DataError naming the file. For an invalid line it is raised, with its number, on access.
    """
    return files.open_task(name, directory, split, error=_data_error)


def open_examples(name: str, directory: Path, split: str) -> Task:
    """Open a split as `open_task` does. Raises DataError also if it has no examples."""
    task = open_task(name, directory, split)
    # A share of no answers would be 0, as if all had been wrong.
    if not len(task):
        raise DataError(
            f"the task '{name}' has no examples of split '{split}'",
            hint="see its num_train and num_test, and what chat_eval.tasks and rl.task name",
        )
    return task


def _data_error(text: str) -> DataError:
    hint = "is it among task_data.datasets? `nanochat run --force task_data`"
    return DataError(text, hint=hint)
