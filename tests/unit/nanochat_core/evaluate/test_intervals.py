import math
import random

import pytest

from nanochat_core.evaluate.intervals import (
    DEVIATIONS,
    Interval,
    centred,
    mean_of,
    ratio_of,
    share_of,
    wilson_interval,
)


@pytest.mark.parametrize(("correct", "total"), [(0, 10), (10, 10), (5, 10), (81, 263), (1, 2)])
def test_the_intervals_ends_are_1_96_deviations_away(correct, total):
    share = correct / total
    low, high = wilson_interval(correct, total)
    assert 0 <= low <= share <= high <= 1
    for end in {low, high} - {0.0, 1.0}:
        assert abs(share - end) / math.sqrt(end * (1 - end) / total) == pytest.approx(
            1.96, abs=1e-4
        )


def test_the_interval_of_81_in_263_is_the_published_one():
    low, high = wilson_interval(81, 263)  # Newcombe 1998, table I, method 3
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


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


def test_the_mean_lies_in_its_interval_95_times_of_100():
    rng = random.Random(0)
    shares, hits, rounds = (0.05, 0.3, 0.5, 0.97), 0, 2000
    for _ in range(rounds):
        seen = [share_of(sum(rng.random() < p for _ in range(60)), 60) for p in shares]
        found = mean_of(seen)
        hits += found.low <= sum(shares) / len(shares) <= found.high
    assert 0.94 < hits / rounds < 0.975


def test_a_ratio_lies_in_its_interval_95_times_of_100():
    rng = random.Random(0)
    hits, rounds = 0, 1000
    for _ in range(rounds):
        below = [rng.uniform(50, 150) for _ in range(80)]
        above = [b * 0.7 + rng.gauss(0, 20) for b in below]
        sums = [sum(above), sum(below), sum(a * a for a in above)]
        both = sum(a * b for a, b in zip(above, below, strict=True))
        found = ratio_of(80, *sums, both, sum(b * b for b in below))
        assert found.value == pytest.approx(sums[0] / sums[1])
        hits += found.low <= 0.7 <= found.high
    assert 0.93 < hits / rounds < 0.97
    alone = ratio_of(1, 3.0, 2.0, 9.0, 6.0, 4.0)
    assert (alone.low, alone.high) == (1.5, 1.5)
    assert DEVIATIONS == 1.959964
