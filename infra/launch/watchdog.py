"""Detect a job that makes no progress, and find the rank that stopped first and its stack.

Ranks wait for one another in every step, so when one hangs, all of them stop soon after. The rank
that hangs is the one with the oldest heartbeat, not the one that first reports an error.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.polling import ASK_SECONDS
from nanochat_core.job import Job
from nanochat_core.runtime.heartbeat import read_heartbeats

_SECONDS_FOR_STACKS = 1.0
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_NEWEST_FIRST = "(most recent call first):"


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A job without progress, and the rank that stopped first."""

    rank: int
    seconds: float  # since the last heartbeat of any rank
    doing: str  # the activity in the rank's last heartbeat
    steps: int  # that the rank had done in this execution


class Watchdog:
    """The periodic check of the ranks' heartbeats."""

    def __init__(self, job: Job, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = heartbeats_of(job)
        self._patience = job.resources.hang_seconds
        self._clock = clock
        self._looked = float("-inf")

    def find(self) -> Hang | None:
        """Return the hang, or None while any rank makes progress. Cheap enough to call often."""
        now = self._clock()
        # `find` is called several times a second; reading every rank's file costs more than that.
        if now - self._looked < min(ASK_SECONDS, self._patience / 4):
            return None
        self._looked = now
        heartbeats = list(read_heartbeats(self._directory))
        if not heartbeats:
            return None
        # `times` is above 1 while a rank starts, or does work that takes long and cannot beat.
        if any(
            now - heartbeat.beat <= self._patience * heartbeat.times for heartbeat in heartbeats
        ):
            return None
        silence = now - max(heartbeat.beat for heartbeat in heartbeats)
        first = min(heartbeats, key=lambda heartbeat: heartbeat.beat)
        return Hang(rank=first.rank, seconds=silence, doing=first.doing, steps=first.steps)

    def dump_stacks(self) -> None:
        """Make every rank write its threads' stacks into its log."""
        for heartbeat in read_heartbeats(self._directory):
            with contextlib.suppress(ProcessLookupError):  # it is gone
                os.kill(heartbeat.pid, signal.SIGUSR1)
        time.sleep(_SECONDS_FOR_STACKS)  # the ranks write on their own: wait before they are killed


def heartbeats_of(job: Job) -> Path:
    """Return the directory of the ranks' heartbeats."""
    return job.directory / "ranks"


def find_place(log: str) -> str | None:
    """Return where the main thread stood in a log's last dump: "file.py:12 in name", or None."""
    # faulthandler dumps the main thread last, and each stack with its innermost frame first.
    frame = _FRAME.search(log.rpartition(_NEWEST_FIRST)[2]) if _NEWEST_FIRST in log else None
    if frame is None:
        return None
    return f"{Path(frame['file']).name}:{frame['line']} in {frame['name']}"
