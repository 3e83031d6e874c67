"""The heartbeat of each rank, by which the launcher detects a job that hangs.

A heartbeat is a 72-byte file per rank, mapped into memory, so that a beat is one store and needs no
system call. It holds the current activity, the time and the number of steps. Every stage beats for
each piece of work: a pass of the model, a question, a batch of documents, the bytes of a download.
The launcher ends a job in which no rank has beaten for the resources' `hang_seconds`. `busy` allows
a multiple of that where one call takes long and cannot beat.
"""

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Multiple of `hang_seconds` before the first beat of the work itself: importing torch, the
# rendezvous of the ranks, loading a model and choosing kernels.
STARTING_TIMES = 4.0
_LAYOUT = struct.Struct("<ddqq40s")  # time, times, steps, process id, what it does
_TIME = struct.Struct("<d")
_PREFIX = "heartbeat-"


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A rank's last beat."""

    rank: int
    pid: int
    beat: float  # time.monotonic, which all processes of a machine share
    times: float  # the next beat is due after this many `hang_seconds`
    steps: int  # done by this execution
    doing: str


class HeartbeatWriter:
    """The writer of this process's heartbeat. Does nothing until a worker opens it."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._memory: mmap.mmap | None = None
        self._steps = 0
        self._times = 1.0
        self._is_starting = self._is_joined = False

    def open(self, directory: Path, rank: int) -> None:
        """Write beats into `directory` from now on, with the longer limit of a starting stage."""
        directory.mkdir(exist_ok=True)
        self._path = directory / f"{_PREFIX}{rank}"
        self._path.write_bytes(bytes(_LAYOUT.size))
        with self._path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._is_starting = True
        self.beat("starting")

    @property
    def path(self) -> Path | None:
        """The file that a helper process of this rank may join; None if not open."""
        return self._path

    def join(self, path: Path) -> None:
        """Beat for the rank of `path` from now on: this process writes the time only."""
        self._is_joined = True
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)

    def started(self) -> None:
        """Mark the end of the start: from here on the limit is one `hang_seconds`."""
        self._is_starting = False
        self.beat("beginning")

    def beat(self, doing: str, *, steps: int = 0) -> None:
        """Record the activity that begins and `steps` more done. Costs about a microsecond."""
        if self._memory is None:
            return
        if self._is_joined:
            self._memory[: _TIME.size] = _TIME.pack(time.monotonic())
            return
        self._steps += steps
        times = max(self._times, STARTING_TIMES if self._is_starting else 1.0)
        # One copy: pack_into clears the bytes first, and a reader could see the zeros.
        self._memory[:] = _LAYOUT.pack(
            time.monotonic(), times, self._steps, os.getpid(), doing.encode()[:40]
        )

    @contextlib.contextmanager
    def busy(self, doing: str, *, times: float) -> Iterator[None]:
        """Allow `times` the usual time between beats, for a long call that cannot beat.

        A comment at the call says why it cannot.
        """
        outer, self._times = self._times, max(self._times, times)
        self.beat(doing)
        try:
            yield
        finally:
            self._times = outer
            self.beat(f"after {doing}")


HEARTBEAT = HeartbeatWriter()


def read_heartbeats(directory: Path) -> Iterator[Heartbeat]:
    """Yield the heartbeats by rank."""
    for path in sorted(
        directory.glob(f"{_PREFIX}*"), key=lambda path: int(path.name.removeprefix(_PREFIX))
    ):
        data = path.read_bytes()
        if len(data) != _LAYOUT.size:  # it is being created
            continue
        beat, times, steps, pid, doing = _LAYOUT.unpack(data)
        if beat > 0:
            yield Heartbeat(
                rank=int(path.name.removeprefix(_PREFIX)),
                pid=pid,
                beat=beat,
                times=times,
                steps=steps,
                doing=doing.rstrip(b"\0").decode(errors="replace"),
            )


def forget_heartbeats(directory: Path) -> None:
    """Remove the heartbeats of an earlier attempt."""
    for path in directory.glob(f"{_PREFIX}*"):
        path.unlink()
