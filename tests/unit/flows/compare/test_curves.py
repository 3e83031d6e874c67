"""Curves in a terminal: their heights, their places, and what they do with nothing."""

import pytest

from flows.compare.curves import GAP, curve, scale_of


def test_a_falling_curve_falls():
    points = [(step, 100.0 - step) for step in range(100)]
    assert curve(points, first=0, last=99, low=1, high=100, width=8) == (
        "\u2588\u2587\u2586\u2585\u2584\u2583\u2582\u2581"
    )


def test_curves_share_a_scale_of_steps_and_of_values():
    points = [(step, 1.0) for step in range(50)]
    drawn = curve(points, first=0, last=99, low=0, high=2, width=10)
    assert drawn == "\u2585" * 5 + GAP * 5


def test_steps_far_apart_are_joined():
    drawn = curve([(20, 1.0), (80, 0.0)], first=0, last=100, low=0, high=1, width=10)
    assert drawn == GAP * 2 + "\u2588" * 6 + "\u2581" + GAP


@pytest.mark.parametrize("points", [[], [(500, 1.0)]])
def test_a_curve_without_points_here_is_empty(points):
    assert curve(points, first=0, last=99, low=0, high=1, width=4) == GAP * 4


def test_a_flat_curve_is_in_the_middle():
    assert curve([(0, 3.0), (1, 3.0)], first=0, last=1, low=3, high=3, width=2) == "\u2585\u2585"


def test_what_is_no_number_does_not_stretch_a_scale():
    assert scale_of([2.0, None, float("nan"), 1.0, float("inf")]) == (1.0, 2.0)
