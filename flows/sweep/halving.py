"""Asynchronous successive halving over seeds: which points get how many.

Rung r has the points that may use r + 1 seeds. Of its n points the best ceil(n / reduction), by the
mean score over those seeds, get one more; one that failed gets none. The size of each rung follows
from the one before, so a point continues as soon as enough others are certain to rank behind it,
whatever the missing scores are. An early decision is therefore the one that all scores together
would give: the order in which runs end changes when a run starts, never which runs exist.
"""

import math
from collections.abc import Mapping, Sequence

FAILED = math.inf  # the score of a point from the seed on that failed


def seeds_allowed(
    scores: Sequence[Mapping[int, float]], *, num_seeds: int, reduction: int
) -> list[int]:
    """Return how many seeds each point may use, given the scores so far.

    Args:
        scores: For each point, by index of seed, the known scores; less is better.
        num_seeds: Most seeds of a point, at least 1.
        reduction: One of so many points of a rung continues, rounded up; 1 stops none.
    """
    allowed = [1] * len(scores)
    size = len(scores)
    for rung in range(num_seeds - 1):
        known = sorted(
            (mean, point)
            for point, values in enumerate(scores)
            if allowed[point] > rung and (mean := mean_to(values, rung)) is not None
        )
        missing = size - len(known)
        size = math.ceil(size / reduction)
        whole = [point for mean, point in known if mean < FAILED]
        for place, point in enumerate(whole):
            if place + missing < size:  # even if all missing ones are better
                allowed[point] += 1
        if not missing:
            size = min(size, len(whole))
    return allowed


def mean_to(values: Mapping[int, float], rung: int) -> float | None:
    """Return the mean over the seeds 0 to `rung`; FAILED if one failed, None if one is missing."""
    first = [values.get(seed) for seed in range(rung + 1)]
    if FAILED in first:
        return FAILED  # the seeds after it are not needed
    known = [value for value in first if value is not None]
    return math.fsum(known) / len(first) if len(known) == len(first) else None
