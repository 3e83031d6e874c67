"""Write and read examples as JSONL, one conversation per line, each parsed on access."""

import functools
import json
import mmap
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, overload

from tasks.base import Conversation, Task, TaskError, View, check_conversation, check_split


def write_examples(path: Path, conversations: Iterable[Conversation]) -> int:
    """Write one JSON object per line, ASCII, keys in the given order; return the number."""
    count = 0
    with path.open("w", encoding="ascii", newline="\n") as file:
        for conversation in conversations:
            file.write(line_of(conversation))
            count += 1
    return count


def line_of(conversation: Conversation) -> str:
    """Return the conversation as a line of JSON with its newline."""
    return json.dumps(conversation, allow_nan=False) + "\n"


def open_task(name: str, directory: Path, split: str) -> Task:
    """Open the examples in `directory/{name}/{split}.jsonl`.

    Raises TaskError naming the file. For an invalid line it is raised, with its number, on access.
    """
    check_split(split)
    return Task(name=name, split=split, examples=JsonLines(directory / name / f"{split}.jsonl"))


class JsonLines(Sequence[Conversation]):
    """The conversations of a JSONL file. Memory holds only the offsets of its lines."""

    def __init__(self, path: Path) -> None:
        """Index the file. Raises TaskError if it cannot be read."""
        self._path = path
        self._starts, self._numbers = array("q"), array("q")  # of lines that are not blank
        try:
            with path.open("rb") as file:
                start = 0
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        self._starts.append(start)
                        self._numbers.append(number)
                    start += len(line)
                # An empty file cannot be mapped.
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if start else b""
        except OSError as error:
            raise TaskError(f"{path} cannot be read: {error.strerror}") from error

    def __reduce__(self) -> tuple[Callable[[Path], "JsonLines"], tuple[Path]]:
        """Pickle as the path: another process opens the file itself, once."""
        return _open_once, (self._path,)

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Conversation: ...
    @overload
    def __getitem__(self, index: slice) -> View: ...
    def __getitem__(self, index: int | slice) -> Conversation | View:
        """Return one conversation, or a view of a part. Raises TaskError naming `path:line`."""
        if isinstance(index, slice):
            return View(self, range(len(self))[index])
        start = self._starts[index]
        # -1 if the last line has no newline.
        end = self._data.find(b"\n", start)
        line = self._data[start : end if end >= 0 else len(self._data)]
        return _parse(line, where=f"{self._path}:{self._numbers[index]}")


@functools.lru_cache(maxsize=64)  # a process gets many slices of few files
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
