"""How long a campaign is and where it starts: one seed for all of them, another one each day.

NANOCHAT_SEED repeats a day, NANOCHAT_TRIALS is the number of trials (kills, races, cuts, requests,
seconds: what the campaign counts).
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

_MAX_SEEDS = 10**6  # of a day: the histories of two days are others


def todays_seed() -> int:
    """Return NANOCHAT_SEED, or today's date as a number: 20261123."""
    return int(os.environ.get("NANOCHAT_SEED") or time.strftime("%Y%m%d"))


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """What a campaign is given, and where it says what it found."""

    seed: int
    found: Callable[[object], None]  # print what the campaign found

    def trials(self, usual: int) -> int:
        """Return NANOCHAT_TRIALS, or the usual number."""
        return int(os.environ.get("NANOCHAT_TRIALS") or usual)

    def seeds(self, usual: int) -> range:
        """Return one seed a trial; no two days have one in common."""
        first = self.seed * _MAX_SEEDS
        return range(first, first + self.trials(usual))
