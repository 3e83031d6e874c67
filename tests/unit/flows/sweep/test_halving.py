"""Successive halving: which points continue, in whatever order runs end."""

import random

import pytest

from flows.sweep.results import FAILED, seeds_allowed


def allowed(table: list[list[float]], reduction: int) -> list[int]:
    """With all scores known."""
    scores = [dict(enumerate(row)) for row in table]
    return seeds_allowed(scores, num_seeds=len(table[0]), reduction=reduction)


@pytest.mark.parametrize(
    ("table", "reduction", "seeds"),
    [
        # The better half of each rung gets the next seed, by the mean of all seeds so far.
        ([[5, 1, 1], [1, 2, 9], [2, 1, 1], [9, 9, 9], [3, 9, 1]], 2, [1, 3, 3, 1, 2]),
        ([[1, 9, 1], [2, 2, 1], [3, 3, 1]], 2, [2, 3, 1]),
        # A reduction of 1 stops none, and one seed needs no decision.
        ([[1, 1, 1], [9, 9, 9]], 1, [3, 3]),
        ([[1], [2]], 2, [1, 1]),
        # Equal scores continue in the order of the grid.
        ([[1, 1], [1, 1], [1, 1], [1, 1]], 2, [2, 2, 1, 1]),
        # A point that failed gets no more seeds, and holds back none.
        ([[FAILED, 1, 1], [9, 1, 1], [FAILED, 1, 1]], 2, [1, 3, 1]),
        ([[1, FAILED, 1], [2, 2, 1], [3, 3, 1], [4, 4, 4]], 2, [2, 3, 1, 1]),
    ],
)
def test_which_points_get_how_many_seeds(table, reduction, seeds):
    assert allowed(table, reduction) == seeds


def test_a_point_continues_before_the_rung_is_whole_once_none_can_take_its_place():
    def known(*values: float | None) -> list[dict[int, float]]:
        return [{} if value is None else {0: value} for value in values]

    # Of four points two go on: the best of three is among them, whatever the fourth has.
    assert seeds_allowed(known(1, 2, 3, None), num_seeds=2, reduction=2) == [2, 1, 1, 1]
    assert seeds_allowed(known(1, 2, None, None), num_seeds=2, reduction=2) == [1, 1, 1, 1]


@pytest.mark.parametrize("reduction", [1, 2, 3])
@pytest.mark.parametrize("seed", range(30))
def test_the_order_in_which_runs_end_decides_nothing(seed, reduction):
    dice = random.Random(seed)
    points, seeds = dice.randint(1, 9), dice.randint(1, 5)
    table = [[dice.choice([1, 2, 3, 4, FAILED]) for _ in range(seeds)] for _ in range(points)]
    final = allowed(table, reduction)

    scores: list[dict[int, float]] = [{} for _ in range(points)]
    while True:
        now = seeds_allowed(scores, num_seeds=seeds, reduction=reduction)
        assert all(early <= late for early, late in zip(now, final, strict=True))
        running = [(p, s) for p in range(points) for s in range(now[p]) if s not in scores[p]]
        if not running:
            break
        point, index = dice.choice(running)
        scores[point][index] = table[point][index]
    assert now == final
