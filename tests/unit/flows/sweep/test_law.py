"""The law of a loss: planted laws are found again, and what points do not determine is reported."""

from collections.abc import Sequence

import numpy as np
import pytest

from flows.sweep.law import fit_law

FLOPS = tuple(10.0 ** (17 + k / 2) for k in range(6))
FLOOR, SCALE, EXPONENT = 0.5, 20.0, 0.08
NEXT = 3e20


def loss(x: float, floor: float = FLOOR) -> float:
    """The planted law."""
    return floor + SCALE * x**-EXPONENT


def planted(
    flops: Sequence[float] = FLOPS, *, noise: float = 0.0, seed: int = 0, floor: float = FLOOR
) -> list[tuple[float, float]]:
    """Points of it, each a little off."""
    random = np.random.default_rng(seed)
    return [(x, loss(x, floor) * (1 + noise * random.standard_normal())) for x in flops]


def test_a_planted_law_is_found_again():
    fit = fit_law(planted())

    assert fit.law.floor == pytest.approx(FLOOR, rel=1e-6)
    assert fit.law.scale == pytest.approx(SCALE, rel=1e-6)
    assert fit.law.exponent == pytest.approx(EXPONENT, rel=1e-6)
    assert fit.doubts == ()
    prediction = fit.predict(NEXT)
    assert prediction.value == pytest.approx(loss(NEXT), rel=1e-6)


def test_ranges_are_no_wider_than_they_need_to_be():
    fit = fit_law(planted(noise=0.0005))

    assert 0.3 < fit.floor_range[0] < FLOOR < fit.floor_range[1] < 0.6


def test_a_floor_that_noise_hides_is_said_to_be_unknown():
    fit = fit_law(planted(noise=0.02))

    assert fit.law.floor == 0
    assert fit.floor_range[0] == 0
    assert fit.floor_range[1] > FLOOR
    assert any("the floor is not determined" in doubt for doubt in fit.doubts)


def test_no_floor_is_found_where_there_is_none():
    fit = fit_law(planted(floor=0.0))

    assert fit.law.floor == pytest.approx(0.0, abs=1e-6)
    assert fit.law.exponent == pytest.approx(EXPONENT, rel=1e-6)


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([], "here is 0"),
        ([(1e18, 1.0)], "here is 1"),
        ([(1e18, 1.0), (1e18, 0.9)], "here is 1"),
        ([(1e18, 1.0), (1e19, 1.1), (1e20, 1.2), (1e21, 1.3)], "the larger models are no better"),
        ([(1e18, 1.0), (1e19, 1.0)], "the larger models are no better"),
    ],
)
def test_points_that_tell_no_law_give_none(points, said):
    fit = fit_law(points)

    assert fit.law is None
    assert fit.predict(1e22) is None
    assert said in fit.doubts[0]


def test_equal_places_do_not_count_as_models_for_a_floor():
    points = planted(FLOPS[:3])

    assert fit_law([*points, points[-1]]).floor_range is None


def test_the_order_of_points_changes_nothing():
    points = planted(noise=0.003)

    assert fit_law(points) == fit_law(points[::-1]) == fit_law(points)


def test_a_prediction_is_less_sure_the_farther_it_is():
    fit = fit_law(planted(noise=0.001))

    widths: list[float] = []
    for x in (2e19, 1e20, 1e21, 1e23):
        prediction = fit.predict(x)
        assert prediction.low < prediction.value < prediction.high
        widths.append(prediction.high - prediction.low)
    assert widths == sorted(widths)
    assert widths[-1] > 3 * widths[0]


def test_a_small_spread_of_sizes_is_said():
    assert any("only 4.0 times" in d for d in fit_law(planted((1e18, 2e18, 3e18, 4e18))).doubts)
