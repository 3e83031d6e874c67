"""95 % intervals of what an evaluation measured.

Of a share of right answers: Wilson's. Of a weighted sum of such shares, as CORE and ChatCORE are:
the intervals of the shares put together as if independent (MOVER, Zou and Donner 2008). That is the
delta method with a variance taken at each end instead of in the middle, so that a task of which
every answer is wrong still counts as uncertain. Of bits per byte, a ratio of two sums over rows of
text: the delta method over rows. All closed forms: no draw, the same numbers every time.

What they say is how far another set of questions of the same kind may move the score. They know
nothing of another seed of training.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

DEVIATIONS = 1.959964  # of a normal distribution, around 95 % of it


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A number and between which it lies."""

    value: float
    low: float
    high: float


def share_of(correct: int, total: int) -> Interval:
    """`correct` of `total`; 0 of nothing, which may be anything."""
    low, high = wilson_interval(correct, total)
    return Interval(value=correct / max(total, 1), low=low, high=high)


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """95 % interval of a share of which `correct` of `total` was seen (Wilson 1927).

    It stays inside 0..1 and does not shrink to a point at 0 or all correct; (0, 1) of nothing.
    """
    if total == 0:
        return 0.0, 1.0
    share, z2 = correct / total, DEVIATIONS**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    spread = share * (1 - share) / total + z2 / (4 * total**2)
    half = DEVIATIONS * math.sqrt(spread) / (1 + z2 / total)
    # Exactly 0 and 1 at the ends, where rounding would leave a share outside its own interval.
    return 0.0 if correct == 0 else centre - half, 1.0 if correct == total else centre + half


def centred(share: Interval, baseline: float) -> Interval:
    """A share on a scale where guessing, which scores `baseline`, is 0 and all right is 1."""
    return Interval(
        value=(share.value - baseline) / (1 - baseline),
        low=(share.low - baseline) / (1 - baseline),
        high=(share.high - baseline) / (1 - baseline),
    )


def mean_of(parts: Sequence[Interval]) -> Interval:
    """The mean of independent numbers, at least one."""
    mean = sum(part.value for part in parts) / len(parts)
    below = math.sqrt(sum((part.value - part.low) ** 2 for part in parts)) / len(parts)
    above = math.sqrt(sum((part.high - part.value) ** 2 for part in parts)) / len(parts)
    return Interval(value=mean, low=mean - below, high=mean + above)


def ratio_of(
    count: float, above: float, below: float, above_2: float, both: float, below_2: float
) -> Interval:
    """The sum of a over the sum of b, of `count` pairs (a, b) of which the sums are known.

    `above`, `below`, `above_2`, `both` and `below_2` are those of a, b, a^2, a b and b^2. Of one
    pair the interval is a point: nothing is known of its spread.
    """
    ratio = above / below
    spread = max(0.0, above_2 - 2 * ratio * both + ratio**2 * below_2)
    half = DEVIATIONS * math.sqrt(spread * count / max(count - 1, 1)) / below if count > 1 else 0.0
    return Interval(value=ratio, low=ratio - half, high=ratio + half)
