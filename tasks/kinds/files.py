"""Examples as JSONL: one conversation per line, each parsed on access."""

import functools
import json
import mmap
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from tasks.base import (
    Conversation,
    Conversations,
    Task,
    TaskError,
    check_conversation,
    check_split,
)

Error: TypeAlias = Callable[[str], Exception]  # makes an error of its text


def line_of(conversation: Conversation) -> str:
    """Return the conversation as a line of JSON with its newline."""
    return json.dumps(conversation, allow_nan=False) + "\n"


def open_task(name: str, directory: Path, split: str, *, error: Error = TaskError) -> Task:
    """Open the examples in `directory/{name}/{split}.jsonl`.

    Raises what `error`, a module's function, makes of a text that names the file. For an invalid
    line it is raised, with its number, on access.
    """
    check_split(split)
    path = directory / name / f"{split}.jsonl"
    return Task(name=name, split=split, examples=JsonLines(path, error))


class JsonLines(Conversations):
    """The conversations of a JSONL file. Memory holds only the offsets of its lines."""

    def __init__(self, path: Path, error: Error = TaskError) -> None:
        """Index the file. Raises what `error` makes of a text if it cannot be read."""
        self._path = path
        self._error = error
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
        except OSError as failure:
            raise error(f"{path} cannot be read: {failure.strerror}") from failure

    def __reduce__(self) -> tuple[Callable[[Path, Error], "JsonLines"], tuple[Path, Error]]:
        """Pickle as the path: another process opens the file itself, once."""
        return _open_once, (self._path, self._error)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, index: int) -> Conversation:
        """Return one conversation. Raises an error naming `path:line`."""
        start = self._starts[index]
        # -1 if the last line has no newline.
        end = self._data.find(b"\n", start)
        line = self._data[start : end if end >= 0 else len(self._data)]
        where = f"{self._path}:{self._numbers[index]}"
        try:
            conversation: Any = json.loads(line.decode("utf-8"))
            check_conversation(conversation)
        except TaskError as error:
            raise self._error(f"{where}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise self._error(f"{where}: not JSON: {error}") from error
        return conversation


@functools.lru_cache(maxsize=64)  # a process gets many slices of few files
def _open_once(path: Path, error: Error) -> JsonLines:
    return JsonLines(path, error)
