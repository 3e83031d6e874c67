"""95 % confidence intervals of evaluation scores.

- A share of right answers: Wilson's interval.
- A weighted sum of such shares, as CORE and ChatCORE are: the intervals of the shares combined as
  independent (MOVER, Zou and Donner 2008). That is the delta method with the variance taken at each
  end instead of in the middle, so that a task with only wrong answers still counts as uncertain.
- Bits per byte, a ratio of two sums over rows of text: the delta method over rows.

All are closed forms without random numbers. They estimate how much another set of questions of the
same kind would change the score, not how much another training seed would.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DEVIATIONS = 1.959964  # standard deviations around the mean that hold 95 % of a normal distribution


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A number and its 95 % confidence interval."""

    value: float
    low: float
    high: float


def metrics_of(scores: Mapping[str, Interval]) -> dict[str, float]:
    """Return each score, and the ends of its interval as {name}_low and {name}_high."""
    metrics: dict[str, float] = {}
    for name, score in scores.items():
        metrics |= {name: score.value, f"{name}_low": score.low, f"{name}_high": score.high}
    return metrics


def share_of(correct: int, total: int) -> Interval:
    """Return the share `correct` / `total`; 0 with the interval (0, 1) if `total` is 0."""
    low, high = wilson_interval(correct, total)
    return Interval(value=correct / max(total, 1), low=low, high=high)


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share if `correct` of `total` was observed (Wilson 1927).

    It stays inside 0..1 and does not shrink to a point at 0 or all correct; (0, 1) if `total` is 0.
    """
    if total == 0:
        return 0.0, 1.0
    share, z2 = correct / total, DEVIATIONS**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    spread = share * (1 - share) / total + z2 / (4 * total**2)
    half = DEVIATIONS * math.sqrt(spread) / (1 + z2 / total)
    # Exactly 0 and 1 at the ends, where rounding could put a share outside its own interval.
    return 0.0 if correct == 0 else centre - half, 1.0 if correct == total else centre + half


def centred(share: Interval, baseline: float) -> Interval:
    """Rescale a share so that guessing, which scores `baseline`, is 0 and all right is 1."""
    return Interval(
        value=(share.value - baseline) / (1 - baseline),
        low=(share.low - baseline) / (1 - baseline),
        high=(share.high - baseline) / (1 - baseline),
    )


def mean_of(parts: Sequence[Interval]) -> Interval:
    """Return the mean of independent numbers, at least one."""
    mean = sum(part.value for part in parts) / len(parts)
    # MOVER: the distances to the lower ends add up as variances do, likewise those to the upper.
    below = math.sqrt(sum((part.value - part.low) ** 2 for part in parts)) / len(parts)
    above = math.sqrt(sum((part.high - part.value) ** 2 for part in parts)) / len(parts)
    return Interval(value=mean, low=mean - below, high=mean + above)


def ratio_of(
    count: float, above: float, below: float, above_2: float, both: float, below_2: float
) -> Interval:
    """Return the sum of a over the sum of b, for `count` pairs (a, b), from their sums.

    `above`, `below`, `above_2`, `both` and `below_2` are the sums of a, b, a^2, a b and b^2. With
    one pair the interval is a point, as its variance is unknown.
    """
    # Delta method: the variance of a / b is about that of a - ratio * b, over (sum of b)^2.
    ratio = above / below
    spread = max(0.0, above_2 - 2 * ratio * both + ratio**2 * below_2)
    half = DEVIATIONS * math.sqrt(spread * count / max(count - 1, 1)) / below if count > 1 else 0.0
    return Interval(value=ratio, low=ratio - half, high=ratio + half)
