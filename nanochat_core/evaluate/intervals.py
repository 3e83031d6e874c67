"""95 % confidence intervals of evaluation scores, and of the difference of two models' scores.

- A share of right answers: Wilson's interval.
- The difference of two shares of the same questions: Newcombe's interval for pairs.
- A weighted sum of such numbers, as CORE and ChatCORE are: their intervals combined as independent
  (MOVER, Zou and Donner 2008). That is the delta method with the variance taken at each end instead
  of in the middle, so that a task with only wrong answers still counts as uncertain.
- Bits per byte, a ratio of two sums over rows of text: the delta method over rows. The difference
  of two models on the same rows is such a ratio too, of the differences of their losses.
- The mean over training seeds: Student's t interval. Pass the differences of paired runs.

All are closed forms without random numbers. All but the last estimate how much another set of
questions of the same kind would change the score, not how much another training seed would.
"""

import math
import statistics
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
    return weighted_sum(parts, [1 / len(parts)] * len(parts))


def weighted_sum(parts: Sequence[Interval], weights: Sequence[float]) -> Interval:
    """Return the sum of independent numbers times their `weights`, none of them negative."""
    pairs = list(zip(weights, parts, strict=True))
    # MOVER: the distances to the lower ends add up as variances do, likewise those to the upper.
    below = math.hypot(*(weight * (part.value - part.low) for weight, part in pairs))
    above = math.hypot(*(weight * (part.high - part.value) for weight, part in pairs))
    value = sum(weight * part.value for weight, part in pairs)
    return Interval(value=value, low=value - below, high=value + above)


def ratio_of(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Return sum(above) / sum(below) of pairs (a, b), one for each row.

    With one pair the interval is a point, as its variance is unknown.
    """
    # Delta method: the variance of a / b is about that of a - ratio * b, over (sum of b)^2.
    total, count = math.fsum(below), len(below)
    ratio = math.fsum(above) / total
    spread = math.fsum((a - ratio * b) ** 2 for a, b in zip(above, below, strict=True))
    half = DEVIATIONS * math.sqrt(spread * count / max(count - 1, 1)) / total if count > 1 else 0.0
    return Interval(value=ratio, low=ratio - half, high=ratio + half)


def difference_of(new: Interval, old: Interval) -> Interval:
    """Return `new` - `old` of two independent numbers (MOVER). Paired answers know more."""
    return _difference(new, old, correlation=0.0)


def paired_difference(total: int, kept: int, gained: int, lost: int) -> Interval:
    """Return the difference, later minus earlier, of two shares of the same `total` questions.

    Of these `kept` were right in both, `gained` only later and `lost` only earlier. The Wilson
    intervals of both shares are combined with their correlation (Newcombe 1998, Statistics in
    Medicine 17:2635, method 10), as Fagerland, Lydersen and Laake recommend (2014, 33:2850).
    """
    neither = total - kept - gained - lost
    new, old = kept + gained, kept + lost
    scale = math.sqrt(new * (total - new) * old * (total - old))
    both = kept * neither - gained * lost
    both = max(both - total / 2, 0) if both > 0 else both  # Newcombe's continuity correction
    correlation = both / scale if scale else 0.0
    return _difference(share_of(new, total), share_of(old, total), correlation=correlation)


def _difference(new: Interval, old: Interval, *, correlation: float) -> Interval:
    def combine(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one**2 - 2 * correlation * one * other + other**2))

    # The lower end is reached where the new number is low and the old one high, and vice versa.
    value = new.value - old.value
    below = combine(new.value - new.low, old.high - old.value)
    above = combine(new.high - new.value, old.value - old.low)
    return Interval(value=value, low=value - below, high=value + above)


def mean_over_seeds(values: Sequence[float]) -> Interval:
    """Return the mean of one value of each seed with Student's t interval; unbounded for one."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(value=mean, low=-math.inf, high=math.inf)
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(value=mean, low=mean - half, high=mean + half)


def t_quantile(degrees: int) -> float:
    """Return how many standard errors around a mean hold 95 % of Student's t distribution.

    `degrees` of freedom, at least 1: 12.706 for 1, 2.776 for 4, 1.960 for very many.
    """
    low, high = 0.0, math.pi / 2
    # 60 halvings of the angle leave less than a float's precision.
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_share(middle, degrees) < 0.95 else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _t_share(angle: float, degrees: int) -> float:
    """Return the share of Student's t within +-sqrt(degrees) * tan(angle).

    A finite sum for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    is_odd = degrees % 2
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for power in range(1 + is_odd, degrees, 2):
        total += term
        term *= power / (power + 1) * math.cos(angle) ** 2
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if is_odd else total
