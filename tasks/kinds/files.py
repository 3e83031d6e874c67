"""Examples in files: JSONL, one conversation a line, read when they are asked for."""

import functools
import json
import mmap
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, overload

from tasks.base import Conversation, Task, TaskError, View, check_conversation, check_split


def write_examples(path: Path, conversations: Iterable[Conversation]) -> int:
    """Write one JSON object a line, ASCII, keys in the order given; returns how many."""
    count = 0
    with path.open("w", encoding="ascii", newline="\n") as file:
        for conversation in conversations:
            file.write(line_of(conversation))
            count += 1
    return count


def line_of(conversation: Conversation) -> str:
    """The conversation as a line of a file."""
    return json.dumps(conversation, allow_nan=False) + "\n"


def open_task(name: str, directory: Path, split: str) -> Task:
    """The examples in `directory/{name}/{split}.jsonl`, each read and checked when asked for.

    Raises TaskError naming the file, now or, for a line that is no conversation, with its number.
    """
    check_split(split)
    return Task(name=name, split=split, examples=JsonLines(directory / name / f"{split}.jsonl"))


class JsonLines(Sequence[Conversation]):
    """The conversations of a JSONL file. Only where its lines begin is kept in memory."""

    def __init__(self, path: Path) -> None:
        """Raises TaskError when the file cannot be read."""
        self._path = path
        self._starts, self._numbers = array("q"), array("q")  # of lines with something in them
        try:
            with path.open("rb") as file:
                start = 0
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        self._starts.append(start)
                        self._numbers.append(number)
                    start += len(line)
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if start else b""
        except OSError as error:
            raise TaskError(f"{path} cannot be read: {error.strerror}") from error

    def __reduce__(self) -> tuple[Callable[[Path], "JsonLines"], tuple[Path]]:
        """Travels to another process by its path, and is opened there once."""
        return _open_once, (self._path,)

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Conversation: ...
    @overload
    def __getitem__(self, index: slice) -> View: ...
    def __getitem__(self, index: int | slice) -> Conversation | View:
        """One conversation, or a view of a part. Raises TaskError naming `path:line`."""
        if isinstance(index, slice):
            return View(self, range(len(self))[index])
        start = self._starts[index]
        end = self._data.find(b"\n", start)
        line = self._data[start : end if end >= 0 else len(self._data)]
        return _parse(line, where=f"{self._path}:{self._numbers[index]}")


@functools.lru_cache(maxsize=64)  # of a process that is given many parts of few files
def _open_once(path: Path) -> JsonLines:
    return JsonLines(path)


def _parse(line: bytes, *, where: str) -> Conversation:
    try:
        conversation: Any = json.loads(line.decode("utf-8"))
        check_conversation(conversation)
    except TaskError as error:
        raise TaskError(f"{where}: {error}") from error
    except ValueError as error:
        raise TaskError(f"{where}: not JSON: {error}") from error
    return conversation
