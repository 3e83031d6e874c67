"""Each rank's sign of life, for the launcher: what it does, since when, after how many steps.

A file of 64 bytes a rank, mapped into memory, so that a beat is one store and needs no system call.
`HEART` does nothing until the worker opens it and a loop promises, with `watch`, to beat until it
says `rest`: what evaluates on its own, say, may be silent for as long as it likes.
"""

import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = struct.Struct("<dqq40s")  # time, steps, process id, what it does
_PREFIX = "heartbeat-"


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """A rank's last sign of life."""

    rank: int
    pid: int
    beat: float  # time.monotonic of the machine, which its processes share
    steps: int  # done by this execution
    doing: str


class Heart:
    """Writes this process's pulse."""

    _memory: mmap.mmap | None = None
    _steps = 0
    _watched = False

    def open(self, directory: Path, rank: int) -> None:
        """From now on beats are written into `directory`."""
        directory.mkdir(exist_ok=True)
        path = directory / f"{_PREFIX}{rank}"
        path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)

    def watch(self) -> None:
        """From here on the launcher may rely on beats."""
        self._watched = True
        self.beat("beginning")

    def beat(self, doing: str, *, steps: int = 0) -> None:
        """Say what begins here, and that `steps` more were done. Costs about a microsecond."""
        if self._memory is None or not self._watched:
            return
        self._steps += steps
        _LAYOUT.pack_into(
            self._memory, 0, time.monotonic(), self._steps, os.getpid(), doing.encode()[:40]
        )

    def rest(self) -> None:
        """What follows may be silent."""
        self._watched = False
        if self._memory is not None:
            self._memory[:] = bytes(_LAYOUT.size)


HEART = Heart()


def read_pulses(directory: Path) -> Iterator[Pulse]:
    """The pulses of the ranks that are watched, by rank."""
    for path in sorted(
        directory.glob(f"{_PREFIX}*"), key=lambda path: int(path.name.removeprefix(_PREFIX))
    ):
        data = path.read_bytes()
        if len(data) != _LAYOUT.size:  # it is being made
            continue
        beat, steps, pid, doing = _LAYOUT.unpack(data)
        if beat > 0:
            yield Pulse(
                rank=int(path.name.removeprefix(_PREFIX)),
                pid=pid,
                beat=beat,
                steps=steps,
                doing=doing.rstrip(b"\0").decode(),
            )


def forget_pulses(directory: Path) -> None:
    """Remove what an earlier attempt left."""
    for path in directory.glob(f"{_PREFIX}*"):
        path.unlink()
