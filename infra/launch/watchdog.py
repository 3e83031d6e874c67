"""Detect a job that makes no progress, and find the rank that stopped first and its stack.

Ranks wait for one another in every step, so when one hangs, all of them stop soon after. The rank
that hangs is the one with the oldest heartbeat, not the one that first reports an error.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from infra.polling import ASK_SECONDS
from nanochat_core.job import Job
from nanochat_core.runtime.heartbeat import Heartbeat, read_heartbeats

_SECONDS_FOR_STACKS = 1.0


class Watchdog:
    """The periodic check of the ranks' heartbeats."""

    def __init__(self, job: Job, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = heartbeats_of(job)
        self._patience = job.resources.hang_seconds
        self._clock = clock
        self._looked = float("-inf")

    def find_hang(self) -> tuple[Heartbeat, float] | None:
        """Return the last heartbeat of the rank that stopped first, and the seconds since any.

        None means that a rank makes progress. Cheap enough to call often.
        """
        now = self._clock()
        # This is called several times a second; reading every rank's file costs more than that.
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
        heartbeats.sort(key=lambda heartbeat: heartbeat.beat)
        return heartbeats[0], now - heartbeats[-1].beat

    def dump_stacks(self) -> None:
        """Make every rank write its threads' stacks into its log."""
        for heartbeat in read_heartbeats(self._directory):
            with contextlib.suppress(ProcessLookupError):  # it is gone
                os.kill(heartbeat.pid, signal.SIGUSR1)
        time.sleep(_SECONDS_FOR_STACKS)  # the ranks write on their own: wait before they are killed


def heartbeats_of(job: Job) -> Path:
    """Return the directory of the ranks' heartbeats."""
    return job.directory / "ranks"
