"""Reads the examples that stage `task_data` prepared, with this package's errors."""

from pathlib import Path

from nanochat_core.errors import DataError
from tasks import registry
from tasks.base import Task, TaskError


def open_task(name: str, directory: Path, split: str) -> Task:
    """A split ("train" or "test") of the task `name` in an artifact of `task_data`.

    Raises DataError naming the file, and the line where one is no conversation.
    """
    try:
        return registry.open_task(name, directory, split)
    except TaskError as error:
        raise DataError(
            str(error), hint="is it among task_data.datasets? `nanochat run --force task_data`"
        ) from error
