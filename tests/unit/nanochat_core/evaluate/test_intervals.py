import pytest

from nanochat_core.evaluate.intervals import (
    Interval,
    centred,
    mean_of,
    paired_difference,
    share_of,
    wilson_interval,
)


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


# The difference of two models that answered the same questions.


def test_the_interval_of_pairs_is_the_published_one():
    found = paired_difference(50, 36, 2, 12)  # Newcombe 1998, his example, method 10
    assert (round(found.low, 4), round(found.high, 4)) == (-0.3404, -0.0569)
    found = paired_difference(21, 1, 1, 7)  # Fagerland 2014, airways; the correction leaves no phi
    assert (round(found.low, 3), round(found.high, 3)) == (-0.507, -0.026)
    for kept, gained, lost in ((0, 1, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0)):
        found = paired_difference(1, kept, gained, lost)
        assert -1 <= found.low <= gained - lost == found.value <= found.high <= 1
        assert found.high - found.low > 0.9  # one question says next to nothing
