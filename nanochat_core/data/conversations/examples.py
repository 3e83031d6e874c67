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


def _data_error(text: str) -> DataError:
    hint = "is it among task_data.datasets? `nanochat run --force task_data`"
    return DataError(text, hint=hint)
