"""Scaling laws of loss by model size: y = floor + scale * x^-exponent, fitted to a few points.

For a given exponent the law is linear in floor and scale, so the best law is found by a search
along the exponent alone, with no starting point to guess. The residuals are relative:
(law - y) / y. A floor is never below 0.

A range is a profile interval at 95 %: it covers all laws whose sum of squares is at most
1 + t^2 / freedom times the least one, t being Student's. It shows what scatter like that of these
points allows, and assumes that the law holds beyond them.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from nanochat_core.evaluate.intervals import t_quantile

Array: TypeAlias = npt.NDArray[np.float64]

FLOOR_NEEDS = 4  # points at different x before a floor is fitted
_NARROW = 10.0  # a smaller ratio of the largest x to the smallest one is reported as a doubt
# The exponent times log(largest x / smallest x): from nearly flat to a fall of e^60.
_LEAST_FALL, _MOST_FALL, _GRID = 1e-4, 60.0, 801
# Each zoom divides the spacing of the grid by 40: after five it is below 1e-9 of the exponent.
_ZOOMS, _ZOOM_GRID = 5, 81
_ANGLES = 181  # floors of an ellipse of laws: its ends are off by at most 4e-5 of its radius
_ROUNDING = 1e-24  # sum of squares of relative rounding errors, generously


@dataclass(frozen=True, kw_only=True)
class Range:
    """The values that the points allow, at 95 %."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Law:
    """y = floor + scale * x^-exponent."""

    floor: float  # 0 in a pure power law
    scale: float
    exponent: float
    exponent_range: Range | None  # None: unknown, since laws with a floor were not fitted
    # Relative standard deviation of the points about the law; None: it goes through all of them.
    scatter: float | None

    def at(self, x: float) -> float:
        """Return the law's y at `x`."""
        return self.floor + self.scale * x**-self.exponent


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The value of a law at an x that was not measured."""

    value: float
    range: Range | None  # of one more measurement, if the law holds; None: unknown
    beyond: float  # x over the largest x that was measured


@dataclass(frozen=True, kw_only=True)
class ScalingFit:
    """The law of some points, and its uncertainties."""

    points: tuple[tuple[float, float], ...]
    law: Law | None  # None: the points determine none
    # Floors that fit; None: too few points to fit one. If it begins at 0, the floor is not
    # determined.
    floor_range: Range | None
    doubts: tuple[str, ...]  # a sentence each

    def predict(self, x: float) -> Prediction | None:
        """Return the law's value at `x`, or None without a law.

        Its range allows for laws with a floor, and is None if none were fitted.
        """
        if self.law is None:
            return None
        value = self.law.at(x)
        known = None
        if self.floor_range is not None:
            family = _Family(self.points, has_floor=True)
            fitting = family.values_at(x)
            # The range of a measurement: the uncertainty of the law and the scatter of one point
            # about it are independent, so they add in quadrature.
            noise = family.student * family.scatter * value
            low = value - math.hypot(max(value - fitting.low, 0.0), noise)
            high = value + math.hypot(max(fitting.high - value, 0.0), noise)
            known = Range(low=max(low, 0.0), high=high)
        return Prediction(value=value, range=known, beyond=x / self.points[-1][0])


def fit_law(points: Sequence[tuple[float, float]]) -> ScalingFit:
    """Fit a law to (x, y) pairs, all positive: with a floor if the points determine one.

    The result does not depend on the order of the points.
    """
    # Sorted, since sums of floats depend on their order.
    points = tuple(sorted((float(x), float(y)) for x, y in points))
    assert all(math.isfinite(x) and math.isfinite(y) and x > 0 and y > 0 for x, y in points)
    sizes = len({x for x, _ in points})
    why_not = None
    if sizes < 2:
        why_not = f"no law: it takes two models of different size, here is {sizes}"
    elif not _falls(points):
        why_not = "no law: the larger models are no better"
    if why_not:
        return ScalingFit(points=points, law=None, floor_range=None, doubts=(why_not,))
    has_floor = sizes >= FLOOR_NEEDS
    family = best = _Family(points, has_floor=has_floor)
    floors = family.floors() if has_floor else None
    # If a floor of 0 fits too, the simpler law without one is drawn.
    if floors is not None and floors.low == 0:
        best = _Family(points, has_floor=False)
    law = Law(
        floor=best.floor,
        scale=best.scale,
        exponent=best.exponent,
        # That of pure power laws alone would leave out the exponents of laws with a floor, and so
        # be too narrow.
        exponent_range=family.exponents if has_floor else None,
        scatter=best.scatter if best.freedom >= 1 else None,
    )
    doubts = tuple(_doubts(family, floors, sizes))
    return ScalingFit(points=points, law=law, floor_range=floors, doubts=doubts)


def _falls(points: Sequence[tuple[float, float]]) -> bool:
    """Return whether a straight line through the logarithms falls."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    x_mean, y_mean = (math.fsum(column) / len(logs) for column in zip(*logs, strict=True))
    return math.fsum((x - x_mean) * (y - y_mean) for x, y in logs) < 0


def _doubts(family: "_Family", floors: Range | None, sizes: int) -> Iterator[str]:
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
    elif floors.low == 0:
        yield (
            f"the floor is not determined: all from 0 to {floors.high:.3g} fit; the line is drawn "
            "without one, so far beyond the points it is the lowest that fits"
        )
    if (ratio := math.exp(family.span)) < _NARROW:
        yield f"the largest model is only {ratio:.1f} times the smallest one"
    if family.freedom >= 1 and family.is_open:
        yield "the exponent is not determined: nearly any fits"


class _Family:
    """The laws with or without a floor, fitted to points at two different x or more."""

    def __init__(self, points: Sequence[tuple[float, float]], *, has_floor: bool) -> None:
        x, self._y = (np.array(column) for column in zip(*points, strict=True))
        # Powers are taken of x over the geometric mean: x itself may be 1e20 FLOPs, whose powers
        # underflow at steep exponents.
        self._centre = float(np.log(x).mean())
        self._logs: Array = np.log(x) - self._centre
        self.span = float(np.ptp(self._logs))
        self._has_floor = has_floor
        self.freedom = len(points) - (3 if has_floor else 2)  # degrees of freedom
        self._exponents: Array = np.geomspace(_LEAST_FALL, _MOST_FALL, _GRID) / self.span
        self.exponent = self._zoom(lambda squares: int(squares.argmin()))
        best = _Profile(self._logs, self._y, np.array([self.exponent]))
        floor = best.allowed_floors(has_floor=has_floor)
        self.floor = floor.item()
        self.scale = best.scales(floor).item() * math.exp(self.exponent * self._centre)
        if self.freedom >= 1:
            least = best.squares(floor).item()
            self.scatter = math.sqrt(least / self.freedom)  # relative standard deviation
            self.student = t_quantile(self.freedom)
            # Points exactly on a law have a sum of squares of rounding errors only.
            self._limit = max(least * (1 + self.student**2 / self.freedom), _ROUNDING)

    @functools.cached_property
    def exponents(self) -> Range:
        """The range of the exponents of all laws that fit."""
        # The best exponent fits even if no point of the grid does.
        low, high = (
            self._zoom(lambda s, end=end: np.flatnonzero(s <= self._limit)[end], self.exponent)
            for end in (0, -1)
        )
        return Range(low=low, high=high)

    @property
    def is_open(self) -> bool:
        """True if exponents up to an end of the searched range fit: they are not determined."""
        ends = self._exponents
        return self.exponents.low <= ends[0] or self.exponents.high >= ends[-1]

    def floors(self) -> Range:
        """Return the range of the floors of all laws that fit, up to the least measured loss."""
        floors = self._fitting[1].clip(max=self._y.min())
        return Range(low=float(floors.min()), high=float(floors.max()))

    def values_at(self, x: float) -> Range:
        """Return the range of y at `x` of all laws that fit."""
        exponents, floors, scales = self._fitting
        values = floors + scales * np.exp(-exponents * (math.log(x) - self._centre))
        return Range(low=float(values.min()), high=float(values.max()))

    @functools.cached_property
    def _fitting(self) -> Array:  # (3, L)
        """Exponents, floors and scales of laws all along the border of those that fit."""
        exponents = np.linspace(self.exponents.low, self.exponents.high, _GRID)
        profile = _Profile(self._logs, self._y, exponents)
        # At one exponent the laws that fit are an ellipse in (floor, scale), cut off at floor 0.
        reach = np.sqrt(np.maximum(self._limit - profile.least, 0.0)) / profile.steepness
        around = np.cos(np.linspace(0, math.pi, _ANGLES))
        floors = np.maximum(profile.floors + reach * around, 0.0)
        rest = self._limit - profile.squares(floors)
        reach = np.sqrt(np.maximum(rest, 0.0)) / profile.power
        ends = np.stack([profile.scales(floors) + sign * reach for sign in (-1, 1)])
        laws = np.stack(np.broadcast_arrays(exponents[:, None], floors, ends))
        return laws[:, :, rest >= -_ROUNDING].reshape(3, -1)

    def _zoom(self, pick: Callable[[Array], int], *around: float) -> float:
        """Return the exponent that `pick` chooses by the sums of squares, of ever finer grids."""
        grid: Array = self._exponents
        found = 0.0
        for _ in range(_ZOOMS + 1):
            grid = np.sort(np.append(grid, around))
            profile = _Profile(self._logs, self._y, grid)
            floors = profile.allowed_floors(has_floor=self._has_floor)
            chosen = pick(profile.squares(floors)[:, 0])
            found = float(grid[chosen])
            low, high = grid[max(chosen - 1, 0)], grid[min(chosen + 1, len(grid) - 1)]
            grid = np.linspace(low, high, _ZOOM_GRID, dtype=np.float64)
        return found


class _Profile:
    """Sums of squares at E exponents: a parabola in the floor and, at each floor, in the scale."""

    def __init__(self, logs: Array, y: Array, exponents: Array) -> None:
        # Columns of the linear problem scale * c1 + floor * c2 = 1, a row for each point. They are
        # made orthogonal, since at flat exponents the powers are nearly constant.
        c1, c2 = np.exp(-exponents[:, None] * logs) / y, 1.0 / y
        self.power = np.linalg.norm(c1, axis=1, keepdims=True)  # (E, 1), as all below
        c1 = c1 / self.power
        self._overlap = c1 @ c2[:, None]
        c2 = c2 - self._overlap * c1
        self.steepness = np.linalg.norm(c2, axis=1, keepdims=True)
        c2 = c2 / self.steepness
        self._scale, floor = (column.sum(axis=1, keepdims=True) for column in (c1, c2))
        residuals = self._scale * c1 + floor * c2 - 1.0
        self.least = (residuals**2).sum(axis=1, keepdims=True)
        self.floors = floor / self.steepness  # with that sum of squares, of either sign

    def squares(self, floors: Array) -> Array:
        """Return the sums of squares of the best laws with these floors."""
        return self.least + (self.steepness * (floors - self.floors)) ** 2

    def scales(self, floors: Array) -> Array:
        """Return the scales of these laws."""
        return (self._scale - self._overlap * floors) / self.power

    def allowed_floors(self, *, has_floor: bool) -> Array:
        """Return the floors of the best laws that are allowed, 0 where laws have none."""
        is_law = (self.floors > 0) & (self.scales(self.floors) > 0)
        return np.where(is_law & has_floor, self.floors, 0.0)
