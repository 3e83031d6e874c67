"""Shuffle any number of conversations on disk: spool them to a file, write them in another order.

Memory holds 16 bytes for each: the offset of its line and a digest of its prompt.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from nanochat_core.job import move_into_place
from nanochat_core.runtime.heartbeat import HEARTBEAT
from tasks.base import Conversation, prompt_key
from tasks.kinds.files import line_of


class Spool:
    """A temporary file of conversations, numbered in the order of arrival. A context manager."""

    def __init__(self, path: Path) -> None:
        """Create the file at `path`, replacing an existing one."""
        self._file = path.open("w+b")
        self._starts = array("q", [0])
        self._prompts = array("Q")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, conversation: Conversation) -> None:
        """Append a conversation."""
        HEARTBEAT.beat("converting examples")
        size = self._file.write(line_of(conversation).encode("ascii"))
        self._starts.append(self._starts[-1] + size)
        self._prompts.append(prompt_digest(conversation))

    def everything(self) -> "Split":
        """Return all conversations, in the order of arrival."""
        return self.split(np.arange(len(self)))

    def split(self, order: npt.NDArray[np.int64]) -> "Split":
        """Return the conversations with these numbers, in that order."""
        return Split(spool=self, order=order)

    def prompts(self, order: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return the digests of the conversations' prompts (n,)."""
        return np.array(self._prompts, dtype=np.uint64)[order]

    def read(self, number: int) -> Conversation:
        """Read one conversation."""
        return json.loads(next(iter(self.lines([number]))))

    def lines(self, order: Iterable[int]) -> Iterable[bytes]:
        """Yield the lines with these numbers."""
        # pread bypasses the file's write buffer.
        self._file.flush()
        for number in order:
            HEARTBEAT.beat("writing examples")
            start = self._starts[number]
            yield os.pread(self._file.fileno(), self._starts[number + 1] - start, start)


@dataclass(frozen=True, kw_only=True)
class Split:
    """The examples of a split, not yet written."""

    spool: Spool
    order: npt.NDArray[np.int64]  # numbers in the spool

    def __len__(self) -> int:
        return len(self.order)

    def first(self, count: int | None) -> "Split":
        """Return the first `count` examples; None means all."""
        return self.spool.split(self.order[:count])

    def write(self, path: Path, *, scratch: Path) -> None:
        """Write the examples as JSONL, atomically; `scratch` is on the same file system."""
        temporary = scratch / f"{path.name}.part"
        with temporary.open("wb") as file:
            file.writelines(self.spool.lines(self.order.tolist()))
        path.parent.mkdir(parents=True, exist_ok=True)
        move_into_place(temporary, path)


def common_prompts(train: Split, test: Split) -> npt.NDArray[np.int64]:
    """Return the numbers of test examples whose prompt is also a training example's."""
    asked = train.spool.prompts(train.order)
    return test.order[np.isin(test.spool.prompts(test.order), asked)]


def prompt_digest(conversation: Conversation) -> int:
    """Return a 64-bit digest of the conversation's prompt."""
    # surrogatepass: a dataset's text may contain lone surrogates.
    text = prompt_key(conversation).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
