"""Each rank's heartbeat, for the launcher: what it does, since when, after how many steps.

A file of 72 bytes a rank, mapped into memory, so that a beat is one store and needs no system call.
Every stage beats from its beginning to its end, once for each piece of work: a pass of the model, a
question, a batch of documents, the bytes of a download. The launcher ends a job in which no rank
has beaten for the resources' `hang_seconds`. `busy` allows a multiple of that where one call takes
long and cannot beat.
"""

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STARTING_TIMES = 4.0  # torch is imported, ranks find each other, a model is loaded, kernels chosen
_LAYOUT = struct.Struct("<ddqq40s")  # time, times, steps, process id, what it does
_TIME = struct.Struct("<d")
_PREFIX = "heartbeat-"


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """A rank's last beat."""

    rank: int
    pid: int
    beat: float  # time.monotonic of the machine, which its processes share
    times: float  # how many `hang_seconds` may pass until the next
    steps: int  # done by this execution
    doing: str


class Heart:
    """Writes this process's pulse. Does nothing until a worker opens it."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._memory: mmap.mmap | None = None
        self._steps = 0
        self._times = 1.0
        self._is_starting = self._is_joined = False

    def open(self, directory: Path, rank: int) -> None:
        """Write beats into `directory` from now on. The stage starts, and may take longer."""
        directory.mkdir(exist_ok=True)
        self._path = directory / f"{_PREFIX}{rank}"
        self._path.write_bytes(bytes(_LAYOUT.size))
        with self._path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._is_starting = True
        self.beat("starting")

    @property
    def path(self) -> Path | None:
        """The file that a process which works for this rank may join; None if there is none."""
        return self._path

    def join(self, path: Path) -> None:
        """Beat for the rank of `path` from now on: only the time is written, the rest is its."""
        self._is_joined = True
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)

    def started(self) -> None:
        """The stage has begun its work: from here on `hang_seconds` count once."""
        self._is_starting = False
        self.beat("beginning")

    def beat(self, doing: str, *, steps: int = 0) -> None:
        """Note what begins here, and that `steps` more were done. Costs about a microsecond."""
        if self._memory is None:
            return
        if self._is_joined:
            self._memory[: _TIME.size] = _TIME.pack(time.monotonic())
            return
        self._steps += steps
        times = max(self._times, STARTING_TIMES if self._is_starting else 1.0)
        # Copied whole: pack_into clears the bytes first, and a reader would see the zeros.
        self._memory[:] = _LAYOUT.pack(
            time.monotonic(), times, self._steps, os.getpid(), doing.encode()[:40]
        )

    @contextlib.contextmanager
    def busy(self, doing: str, *, times: float) -> Iterator[None]:
        """Allow `times` the usual silence inside, for work that takes long and cannot beat.

        A comment at the call says why it cannot.
        """
        outer, self._times = self._times, max(self._times, times)
        self.beat(doing)
        try:
            yield
        finally:
            self._times = outer
            self.beat(f"after {doing}")


HEART = Heart()


def read_pulses(directory: Path) -> Iterator[Pulse]:
    """Yield the pulses by rank."""
    for path in sorted(
        directory.glob(f"{_PREFIX}*"), key=lambda path: int(path.name.removeprefix(_PREFIX))
    ):
        data = path.read_bytes()
        if len(data) != _LAYOUT.size:  # it is being made
            continue
        beat, times, steps, pid, doing = _LAYOUT.unpack(data)
        if beat > 0:
            yield Pulse(
                rank=int(path.name.removeprefix(_PREFIX)),
                pid=pid,
                beat=beat,
                times=times,
                steps=steps,
                doing=doing.rstrip(b"\0").decode(errors="replace"),
            )


def forget_pulses(directory: Path) -> None:
    """Remove what an earlier attempt left."""
    for path in directory.glob(f"{_PREFIX}*"):
        path.unlink()
