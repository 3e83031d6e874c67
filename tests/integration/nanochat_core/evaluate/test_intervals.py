"""scipy's answers to the same questions."""

import math
import random

import pytest

from nanochat_core.evaluate.intervals import (
    difference_of,
    mean_over_seeds,
    ratio_of,
    t_quantile,
    wilson_interval,
)


@pytest.fixture(scope="module")
def stats():
    from scipy import stats  # most of a second that no other file needs

    return stats


@pytest.mark.parametrize(("correct", "total"), [(0, 7), (7, 7), (1, 3), (40, 100), (999, 14_042)])
def test_scipy_has_the_same_interval_of_a_share(correct, total, stats):
    expected = stats.binomtest(correct, total).proportion_ci(0.95, method="wilson")
    low, high = wilson_interval(correct, total)
    assert (low, high) == pytest.approx(tuple(expected), abs=1e-7)
    assert 0 <= low <= correct / total <= high <= 1


@pytest.mark.parametrize("degrees", [*range(1, 13), 29, 30, 100, 1001])
def test_scipy_has_the_same_quantiles_of_students_t(degrees, stats):
    assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-12)


def test_scipy_has_the_same_interval_of_paired_seeds(stats):
    ours, peers = [0.81, 0.79, 0.84, 0.8], [0.83, 0.8, 0.84, 0.83]
    found = mean_over_seeds([a - b for a, b in zip(ours, peers, strict=True)])
    expected = stats.ttest_rel(ours, peers).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    alone = mean_over_seeds([0.5])
    assert (alone.value, alone.low, alone.high) == (0.5, -math.inf, math.inf)


def test_the_difference_of_bits_per_byte_is_that_of_a_paired_bootstrap(stats):
    rng = random.Random(0)
    num_bytes = [rng.randint(1500, 2500) for _ in range(200)]
    hardness = [rng.gauss(1.0, 0.2) for _ in num_bytes]  # of the text, common to both models
    old = [h * b for h, b in zip(hardness, num_bytes, strict=True)]
    new = [n - 0.01 * b + rng.gauss(0, 40) for n, b in zip(old, num_bytes, strict=True)]
    changes = [n - o for n, o in zip(new, old, strict=True)]
    found = ratio_of(changes, num_bytes)

    def statistic(above, below, axis):
        return above.sum(axis=axis) / below.sum(axis=axis)

    drawn = stats.bootstrap((changes, num_bytes), statistic, paired=True, n_resamples=4000, rng=0)
    expected = drawn.confidence_interval
    width = expected.high - expected.low
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.06 * width)
    apart = difference_of(ratio_of(new, num_bytes), ratio_of(old, num_bytes))
    assert apart.value == pytest.approx(found.value)
    assert found.high < 0 < apart.high  # the pairs see what two intervals do not
    assert apart.high - apart.low > 5 * width


def test_equal_rows_give_the_interval_of_a_mean(stats):
    changes = [0.3, -0.1, 0.25, 0.4, 0.05]
    found = ratio_of(changes, [2.0] * 5)
    assert found.value == pytest.approx(0.09)
    half = stats.norm.ppf(0.975) * stats.sem(changes) / 2
    assert found.high - found.value == pytest.approx(half, rel=1e-6)
    alone = ratio_of([3.0], [2.0])
    assert (alone.low, alone.high) == (1.5, 1.5)
