"""Scaling laws of loss by model size: y = floor + scale * x^-exponent, fitted to a few points.

For a given exponent the law is linear in floor and scale, so the best law is found by a search
along the exponent alone, with no starting point to guess. The residuals are relative:
(law - y) / y. A floor is never below 0.

A range at 95 % is a parametric bootstrap: laws are fitted to points drawn about the best law. Each
draw has its own standard deviation, so that few points give ranges as wide as Student's t does.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from flows.render.paired import Score

Array: TypeAlias = npt.NDArray[np.float64]

FLOOR_NEEDS = 4  # points at different x before a floor is fitted
_NARROW = 10.0  # a smaller ratio of the largest x to the smallest one is reported as a doubt
# The exponent times log(largest x / smallest x): from nearly flat to a fall of e^60.
_MIN_FALL, _MAX_FALL, _GRID = 1e-4, 60.0, 41
# Each zoom divides the spacing of the grid by 5: after 14 it is below 1e-9 of the exponent. A draw
# needs no more than 1e-3.
_ZOOM_GRID, _ZOOMS, _DRAW_ZOOMS = 11, 14, 4
_DRAWS, _SEED = 400, 42
_MAX_NOISE = 3.0  # of the logarithm of a drawn loss: one degree of freedom draws any deviation


Range: TypeAlias = tuple[float, float]  # the least and the largest that the points allow, at 95 %


@dataclass(frozen=True, kw_only=True)
class Law:
    """y = floor + scale * x^-exponent."""

    floor: float  # 0 in a pure power law
    scale: float
    exponent: float
    # Relative standard deviation of the points about the law; None: it goes through all of them.
    scatter: float | None = None

    def at(self, x: float) -> float:
        """Return the law's y at `x`."""
        return self.floor + self.scale * x**-self.exponent

    def formula(self, symbol: str) -> str:
        """Return the law as text: 0.52 + 21.3 C^-0.081."""
        floor = f"{self.floor:.4g} + " if self.floor else ""
        return f"{floor}{self.scale:.4g} {symbol}^-{self.exponent:.3g}"


@dataclass(frozen=True, kw_only=True)
class ScalingFit:
    """The law of some points, and its uncertainties."""

    points: tuple[tuple[float, float], ...]
    doubts: tuple[str, ...]  # a sentence each
    law: Law | None = None  # None: the points determine none
    # None: too few points to fit a floor. A range from 0 means that the floor is not determined.
    floor_range: Range | None = None
    exponent_range: Range | None = None  # None: unknown, since laws with a floor were not fitted

    def predict(self, x: float) -> Score | None:
        """Return the law's value at `x`, or None without a law.

        The interval is of one more measurement, if the law holds. It allows for laws with a floor;
        without one if none were fitted.
        """
        if self.law is None:
            return None
        if self.floor_range is None:
            return Score(value=self.law.at(x))
        (floors, scales, exponents), noise = _bootstrap(self.points)
        low, high = _range((floors + scales * x**-exponents) * np.exp(noise))
        return Score(value=self.law.at(x), low=low, high=high)


def fit_law(points: Sequence[tuple[float, float]]) -> ScalingFit:
    """Fit a law to (x, y) pairs, all positive: with a floor if the points determine one.

    The result does not depend on the order of the points.
    """
    # Sorted, since sums of floats depend on their order.
    points = tuple(sorted((float(x), float(y)) for x, y in points))
    assert all(math.isfinite(x) and math.isfinite(y) and x > 0 and y > 0 for x, y in points)
    sizes = len({x for x, _ in points})
    doubt = None
    if sizes < 2:
        doubt = f"no law: it takes two models of different size, here is {sizes}"
    elif np.cov(np.log(np.array(points)).T)[0, 1] >= 0:
        doubt = "no law: the larger models are no better"
    if doubt:
        return ScalingFit(points=points, doubts=(doubt,))
    floors = exponents = None
    if sizes >= FLOOR_NEEDS:
        laws, _ = _bootstrap(points)
        floors = _range(laws[0].clip(max=min(y for _, y in points)))
        exponents = _range(laws[2])
    # If a floor of 0 fits too, the simpler law without one is drawn.
    law = _best(points, has_floor=floors is not None and floors[0] > 0)
    doubts = tuple(_doubts(points, floors, exponents, sizes))
    return ScalingFit(
        points=points, law=law, floor_range=floors, exponent_range=exponents, doubts=doubts
    )


def _doubts(
    points: Sequence[tuple[float, float]],
    floors: Range | None,
    exponents: Range | None,
    sizes: int,
) -> Iterator[str]:
    if floors is None:
        yield (
            f"no floor is fitted: it takes {FLOOR_NEEDS} models, here are {sizes}; without one the "
            "line is too low far beyond the points"
        )
        yield (
            "a line through two points is always exact: its uncertainty is unknown"
            if sizes == 2
            else "uncertainties of exponent and predictions are unknown without a floor"
        )
    elif floors[0] == 0:
        yield (
            f"the floor is not determined: all from 0 to {floors[1]:.3g} fit; the line is drawn "
            "without one, so far beyond the points it is the lowest that fits"
        )
    if (ratio := points[-1][0] / points[0][0]) < _NARROW:
        yield f"the largest model is only {ratio:.1f} times the smallest one"
    # Half of the search's logarithmic width.
    if exponents and exponents[1] / exponents[0] > math.sqrt(_MAX_FALL / _MIN_FALL):
        yield "the exponent is not determined: nearly any fits"


def _best(points: Sequence[tuple[float, float]], *, has_floor: bool) -> Law:
    """Return the law with the least sum of squares."""
    x, y = np.array(points).T
    floor, scale, exponent = (float(v) for v in _fit(x, y[None], has_floor=has_floor)[:, 0])
    law = Law(floor=floor, scale=scale, exponent=exponent)
    freedom = len(points) - (3 if has_floor else 2)
    squares = math.fsum((law.at(x) / y - 1) ** 2 for x, y in points)
    return replace(law, scatter=math.sqrt(squares / freedom)) if freedom > 0 else law


def _bootstrap(points: Sequence[tuple[float, float]]) -> tuple[Array, Array]:
    """Return (3, draws) laws with a floor that the points allow, and the noise of one more point.

    Noise is of the logarithm of y. Equal points give equal draws.
    """
    law, freedom = _best(points, has_floor=True), len(points) - 3
    assert law.scatter is not None
    random = np.random.default_rng(_SEED)
    scatter = law.scatter * np.sqrt(freedom / random.chisquare(freedom, (_DRAWS, 1)))
    noise = scatter * random.standard_normal((_DRAWS, len(points) + 1))
    noise = noise.clip(-_MAX_NOISE, _MAX_NOISE)
    x = np.array([x for x, _ in points])
    drawn = (law.floor + law.scale * x**-law.exponent) * np.exp(noise[:, :-1])
    return _fit(x, drawn, has_floor=True), noise[:, -1]


def _range(values: Array) -> Range:
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def _fit(x: Array, y: Array, *, has_floor: bool) -> Array:
    """Return the (3, rows) floors, scales and exponents of the best law of each row of `y`."""
    # Powers are taken of x over the geometric mean: x itself may be 1e20 FLOPs, whose powers
    # underflow at steep exponents.
    centre = np.log(x).mean()
    logs, rows = np.log(x) - centre, np.arange(len(y))
    exponents = np.geomspace(_MIN_FALL, _MAX_FALL, _GRID) / np.ptp(logs)
    grid: Array = np.broadcast_to(exponents, (len(y), _GRID))
    floors = scales = found = np.zeros(len(y))
    for _ in range(1 + (_ZOOMS if len(y) == 1 else _DRAW_ZOOMS)):
        every_floor, every_scale, squares = _solve(logs, y, grid, has_floor=has_floor)
        best = squares.argmin(axis=1)
        floors, scales, found = (a[rows, best] for a in (every_floor, every_scale, grid))
        low = grid[rows, np.maximum(best - 1, 0)]
        high = grid[rows, np.minimum(best + 1, grid.shape[1] - 1)]
        grid = np.linspace(low, high, _ZOOM_GRID, axis=1)
    return np.stack([floors, scales * np.exp(found * centre), found])


def _solve(
    logs: Array, y: Array, exponents: Array, *, has_floor: bool
) -> tuple[Array, Array, Array]:
    """Return the best floors and scales at these (rows, E) exponents, and the sums of squares."""
    # Columns of the linear problem scale * c1 + floor * c2 = 1. They are made orthogonal, since at
    # flat exponents the powers are nearly constant.
    c2 = 1.0 / y[:, None]
    c1 = np.exp(-exponents[..., None] * logs) * c2  # (rows, E, points)
    power = np.linalg.norm(c1, axis=2)
    c1 /= power[..., None]
    overlap = (c1 * c2).sum(axis=2)
    rest = c2 - overlap[..., None] * c1
    floors = rest.sum(axis=2) / (rest**2).sum(axis=2)
    shares = c1.sum(axis=2)
    is_law = has_floor & (floors > 0) & (shares > overlap * floors)
    floors = np.where(is_law, floors, 0.0)
    scales = shares - overlap * floors
    squares = ((scales[..., None] * c1 + floors[..., None] * c2 - 1.0) ** 2).sum(axis=2)
    return floors, scales / power, squares
