"""Intervals of scores: scipy's answers to the same questions, and published examples."""

import math
import random

import pytest

from nanochat_core.evaluate.intervals import (
    Interval,
    centred,
    difference_of,
    mean_of,
    mean_over_seeds,
    paired_difference,
    ratio_of,
    share_of,
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


def test_nothing_seen_says_nothing():
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert share_of(0, 0).value == 0.0


def test_centred_shares_are_0_at_guessing_and_1_at_all_right():
    found = centred(Interval(value=0.25, low=0.0, high=1.0), 0.25)
    assert (found.value, found.high) == (0.0, 1.0)
    assert found.low == pytest.approx(-1 / 3)


def test_the_mean_of_many_is_known_better_than_each():
    parts = [share_of(30, 100) for _ in range(16)]
    mean = mean_of(parts)
    assert mean.value == pytest.approx(0.3)
    assert mean.value - mean.low == pytest.approx((parts[0].value - parts[0].low) / 4)
    assert mean.high - mean.value == pytest.approx((parts[0].high - parts[0].value) / 4)
    assert mean_of([share_of(0, 50)]).high == pytest.approx(share_of(0, 50).high)


def test_the_interval_of_pairs_is_the_published_one():
    found = paired_difference(50, 36, 2, 12)  # Newcombe 1998, his example, method 10
    assert (round(found.low, 4), round(found.high, 4)) == (-0.3404, -0.0569)
    found = paired_difference(21, 1, 1, 7)  # Fagerland 2014, airways; the correction leaves no phi
    assert (round(found.low, 3), round(found.high, 3)) == (-0.507, -0.026)
    for kept, gained, lost in ((0, 1, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0)):
        found = paired_difference(1, kept, gained, lost)
        assert -1 <= found.low <= gained - lost == found.value <= found.high <= 1
        assert found.high - found.low > 0.9  # one question says next to nothing
