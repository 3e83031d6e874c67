"""The two kinds of tasks: generated ones, and those whose dataset is on the Hub.

Declarations only: stage `task_data` downloads and converts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from tasks.base import Conversation, TaskError, kind_of

Row: TypeAlias = Mapping[str, Any]  # of a dataset, by column


class Generate(Protocol):
    """A function that yields a split's examples, deterministic; a smaller number is a prefix."""

    def __call__(
        self, split: str, num_examples: int, *, grade: int, seed: int
    ) -> Iterator[Conversation]: ...


IsCorrect: TypeAlias = Callable[[Conversation, str], bool]  # answers with calls as `<<a=b>>`
AreCorrect: TypeAlias = Callable[[Sequence[tuple[Conversation, str]]], list[bool]]


@dataclass(frozen=True, kw_only=True)
class Grader:
    """The functions that grade answers to a task."""

    is_correct: IsCorrect
    baseline: float  # accuracy of guessing; 0.0 if answers cannot be guessed
    are_correct: AreCorrect | None = None  # grades many at a time, if that is faster
    check_machine: Callable[[], object] | None = None  # raises TaskError if it cannot grade here


@dataclass(frozen=True, kw_only=True)
class GeneratedTask:
    """A task whose examples are synthetic or in a small file of this repository."""

    name: str
    generate: Generate
    grader: Grader | None  # None means that answers are not graded


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """The location of a dataset on the Hub."""

    repository: str
    revision: str  # a commit, or a branch if no commit has been verified
    files: Mapping[str, str]  # split -> pattern of its parquet files; a split may be missing


@dataclass(frozen=True, kw_only=True)
class HubTask:
    """A task whose examples are rows of a dataset on the Hub."""

    name: str
    dataset: HubDataset
    convert: Callable[[Row], Conversation]  # raises TaskError for an invalid row
    grader: Grader | None  # None means not graded, or by one of `tasks.names.GRADERS`


AnyTask: TypeAlias = GeneratedTask | HubTask


def text(row: Row, column: str) -> str:
    """Return the text in a column. Raises TaskError if it has none."""
    value = row.get(column)
    if not isinstance(value, str):
        raise TaskError(f"column '{column}' holds {kind_of(value)}, expected text")
    return value


def texts(row: Row, column: str) -> list[str]:
    """Return the list of texts in a column. Raises TaskError if it has none."""
    value = row.get(column)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TaskError(f"column '{column}' holds {kind_of(value)}, expected a list of texts")
    return value
