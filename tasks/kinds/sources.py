"""What kinds of tasks there are: those made up here, and those whose dataset lies on the Hub.

Data only: who downloads, and where to, is not a task's business.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from tasks.base import Conversation, TaskError

Row: TypeAlias = Mapping[str, Any]  # of a dataset, by column


class Generate(Protocol):
    """Makes the examples of a split, the same for the same arguments; fewer is a prefix."""

    def __call__(
        self, split: str, num_examples: int, *, grade: int, seed: int
    ) -> Iterator[Conversation]: ...


IsCorrect: TypeAlias = Callable[[Conversation, str], bool]  # answers with calls as `<<a=b>>`
AreCorrect: TypeAlias = Callable[[Sequence[tuple[Conversation, str]]], list[bool]]


@dataclass(frozen=True, kw_only=True)
class Grader:
    """How answers to a task are graded."""

    is_correct: IsCorrect
    baseline: float  # accuracy of guessing; 0.0 where nothing can be guessed
    are_correct: AreCorrect | None = None  # for a task that grades many at a time in less time
    check_machine: Callable[[], object] | None = None  # raises TaskError where it cannot grade


@dataclass(frozen=True, kw_only=True)
class GeneratedTask:
    """A task whose examples are made up, or kept in a small file of ours."""

    name: str
    generate: Generate
    grader: Grader | None  # None: there is nothing to grade


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """Where a dataset lies on the Hub."""

    repository: str
    revision: str  # a commit; a branch where no commit is known to hold what is wanted
    files: Mapping[str, str]  # split -> pattern of its parquet files' names; some lack a split


@dataclass(frozen=True, kw_only=True)
class HubTask:
    """A task whose examples are rows of a dataset on the Hub."""

    name: str
    dataset: HubDataset
    convert: Callable[[Row], Conversation]  # raises TaskError for a row that is none
    grader: Grader | None  # None: nothing to grade, or graded by one of `tasks.names.GRADERS`


AnyTask: TypeAlias = GeneratedTask | HubTask


def text(row: Row, column: str) -> str:
    """The text in a column. Raises TaskError when there is none."""
    value = row.get(column)
    if not isinstance(value, str):
        raise TaskError(f"column '{column}' holds {_kind(value)}, expected text")
    return value


def texts(row: Row, column: str) -> list[str]:
    """The list of texts in a column. Raises TaskError when there is none."""
    value = row.get(column)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TaskError(f"column '{column}' holds {_kind(value)}, expected a list of texts")
    return value


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
