"""Read the examples that stage `task_data` prepared, with this package's errors."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import overload

from nanochat_core.errors import DataError
from tasks.base import Conversation, Task, TaskError, View
from tasks.kinds import files

_HINT = "is it among task_data.datasets? `nanochat run --force task_data`"


class Examples(Sequence[Conversation]):
    """The conversations of a file. Accessing an invalid one raises DataError."""

    def __init__(self, examples: Sequence[Conversation]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    @overload
    def __getitem__(self, index: int) -> Conversation: ...
    @overload
    def __getitem__(self, index: slice) -> View: ...
    def __getitem__(self, index: int | slice) -> Conversation | View:
        """Return one conversation, or a view of a part."""
        if isinstance(index, slice):
            return View(self, range(len(self))[index])
        try:
            return self._examples[index]
        except TaskError as error:
            raise DataError(str(error), hint=_HINT) from error


def open_task(name: str, directory: Path, split: str) -> Task:
    """Open a split ("train" or "test") of the task `name` in an artifact of `task_data`.

    Raises DataError naming the file. For an invalid line it is raised, with its number, on access.
    """
    try:
        task = files.open_task(name, directory, split)
    except TaskError as error:
        raise DataError(str(error), hint=_HINT) from error
    return replace(task, examples=Examples(task.examples))
