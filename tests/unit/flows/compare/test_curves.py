"""Curves in a terminal: their heights, their places, and what they do with nothing."""

from flows.compare.curves import GAP, WIDTH, curve


def test_a_falling_curve_falls():
    points = [(step, 480.0 - step) for step in range(480)]
    drawn = curve(points, (0, 479), (1, 480))
    assert list(dict.fromkeys(drawn)) == list("\u2588\u2587\u2586\u2585\u2584\u2583\u2582\u2581")
    assert drawn == "".join(sorted(drawn, reverse=True))


def test_curves_share_a_scale_of_steps_and_of_values():
    points = [(step, 1.0) for step in range(50)]
    assert curve(points, (0, 99), (0, 2)) == "\u2585" * (WIDTH // 2) + GAP * (WIDTH // 2)


def test_a_curve_without_points_is_empty_and_a_flat_one_in_the_middle():
    assert curve([], (0, 100), (0, 1)) == GAP * WIDTH
    assert curve([(0, 3.0), (1, 3.0)], (0, 1), (3, 3)) == "\u2585" + GAP * (WIDTH - 2) + "\u2585"
