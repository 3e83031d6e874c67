"""Notices a job in which nothing moves any more, and finds out which rank stopped first, and where.

Ranks wait for one another in every step, so when one hangs all stand still soon after. Who hangs is
not who complains first: it is the rank whose last sign of life is the oldest. Its stack says where.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nanochat_core.job import Job
from nanochat_core.runtime.heartbeat import Pulse, read_pulses

_SECONDS_FOR_STACKS = 1.0
_SECONDS_BETWEEN_LOOKS = 1.0
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_NEWEST_FIRST = "(most recent call first):"


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A job that stands still, and the rank that stopped first."""

    rank: int
    seconds: float  # since the last sign of life of any rank
    doing: str  # what the rank said last
    steps: int  # it had done in this execution


class Watchdog:
    """Looks at the ranks' signs of life now and again."""

    def __init__(self, job: Job, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = pulses_of(job)
        self._patience = job.resources.hang_seconds
        self._clock = clock
        self._looked = float("-inf")

    def find(self) -> Hang | None:
        """The hang, once there is one. Costs next to nothing when called often."""
        now = self._clock()
        if now - self._looked < min(_SECONDS_BETWEEN_LOOKS, self._patience / 4):
            return None
        self._looked = now
        pulses = list(read_pulses(self._directory))
        if not pulses:
            return None
        if any(now - pulse.beat <= self._patience * pulse.times for pulse in pulses):
            return None
        silence = now - max(pulse.beat for pulse in pulses)
        first = min(pulses, key=lambda pulse: pulse.beat)
        return Hang(rank=first.rank, seconds=silence, doing=first.doing, steps=first.steps)

    def dump_stacks(self) -> None:
        """Have every rank write its threads' stacks into its log."""
        for pulse in read_pulses(self._directory):
            _signal(pulse)
        time.sleep(_SECONDS_FOR_STACKS)


def pulses_of(job: Job) -> Path:
    """Where a job's ranks leave their signs of life."""
    return job.directory / "ranks"


def find_place(log: str) -> str | None:
    """Where the main thread of the last dump in a log stands: "file.py:12 in name"."""
    frame = _FRAME.search(log.rpartition(_NEWEST_FIRST)[2]) if _NEWEST_FIRST in log else None
    if frame is None:
        return None
    return f"{Path(frame['file']).name}:{frame['line']} in {frame['name']}"


def _signal(pulse: Pulse) -> None:
    with contextlib.suppress(ProcessLookupError):  # it is gone
        os.kill(pulse.pid, signal.SIGUSR1)
