"""Least-squares fit of laws y = floor + scale * x^-exponent, and the ranges of laws that fit.

For a given exponent the law is linear in floor and scale, so the best of all laws is found by a
search along the exponent alone, with no starting point to guess. The residuals are relative:
(law - y) / y. A floor is never below 0.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]

# The exponent times log(largest x / smallest x): from nearly flat to a fall of e^60.
_LEAST_FALL, _MOST_FALL, _GRID = 1e-4, 60.0, 801
# Each zoom divides the spacing of the grid by 40: after five it is below 1e-9 of the exponent.
_ZOOMS, _ZOOM_GRID = 5, 81
_BISECTIONS = 60  # more than the 53 bits of a float64
# Student's t for 95 %, two-sided, from 1 degree of freedom on.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


@dataclass(frozen=True, kw_only=True)
class Range:
    """The values that the points allow, at 95 %."""

    low: float
    high: float


class ScalingFit:
    """The family of laws with or without a floor, fitted to points at two different x or more."""

    def __init__(self, points: Sequence[tuple[float, float]], *, has_floor: bool) -> None:
        x, y = (np.array(column) for column in zip(*points, strict=True))
        self._logs: Array = np.log(x)
        # Powers are taken of x over the geometric mean: x itself may be 1e20 FLOPs, whose powers
        # underflow at steep exponents.
        self._centre = float(self._logs.mean())
        self.span = float(self._logs.max() - self._logs.min())
        self._weights: Array = 1.0 / y  # makes the residuals relative
        self._has_floor = has_floor
        self.freedom = len(points) - (3 if has_floor else 2)  # degrees of freedom
        self._grid: Array = np.geomspace(_LEAST_FALL, _MOST_FALL, _GRID) / self.span
        self.exponent = self._search()  # of the best law
        best = self._solve(np.array([self.exponent]))
        self.floor = float(best.floor[0])
        self.scale = float(best.scale[0]) * math.exp(self.exponent * self._centre)
        self._least = float(best.squares[0])

    @property
    def scatter(self) -> float:
        """Relative standard deviation of the points about the best law. Needs freedom >= 1."""
        return math.sqrt(self._least / self.freedom)

    @property
    def student(self) -> float:
        """Student's t for 95 % at this number of degrees of freedom."""
        return _T95[min(self.freedom, len(_T95)) - 1]

    @property
    def is_open(self) -> bool:
        """True if exponents up to an end of the searched range fit: they are not determined."""
        found = self.exponents()
        return found.low <= self._grid[0] or found.high >= self._grid[-1]

    def exponents(self) -> Range:
        """Return the range of the exponents of all laws that fit."""
        alphas, _ = self._fitting
        return Range(low=float(alphas[0]), high=float(alphas[-1]))

    def floors(self) -> Range:
        """Return the range of the floors of all laws that fit, up to the least measured loss."""
        alphas, limit = self._fitting
        free = self._solve(alphas).free
        assert free is not None
        # At a fixed exponent the sum of squares is a parabola in the floor: how far from its best
        # value until the sum reaches the limit.
        reach = np.sqrt(np.maximum(limit - free.squares, 0.0) * free.floor_variance)
        fits = (free.squares <= limit) & (free.floor + reach >= 0)
        if not fits.any():
            return Range(low=0.0, high=0.0)
        low = np.maximum((free.floor - reach)[fits], 0.0)
        high = float((free.floor + reach)[fits].max())
        least = float(1.0 / self._weights.max())
        return Range(low=min(float(low.min()), least), high=min(high, least))

    def values_at(self, x: float) -> Range:
        """Return the range of y at `x` of all laws that fit."""
        alphas, limit = self._fitting
        solved = self._solve(alphas)
        phi = np.exp(-alphas * (math.log(x) - self._centre))
        ends = _plain_ends(solved.plain, phi, limit)
        if solved.free is not None:
            ends = np.concatenate([ends, _free_ends(solved.free, phi, limit)])
        return Range(low=float(ends.min()), high=float(ends.max()))

    @functools.cached_property
    def _fitting(self) -> tuple[Array, float]:
        """Exponents from the least to the largest that fits, and the limit of the sum of squares.

        The limit is that of a profile interval: least + t^2 * least / freedom.
        """
        limit = self._least * (1 + self.student**2 / self.freedom)
        places = np.flatnonzero(self._solve(self._grid).squares <= limit)
        # The best exponent lies between grid points and always fits, even if no grid point does.
        above = int(np.searchsorted(self._grid, self.exponent))
        first = min(int(places[0]) if len(places) else above, above)
        last = max(int(places[-1]) if len(places) else above - 1, above - 1)
        low = self._edge(limit, min(self.exponent, self._at(first)), first - 1)
        high = self._edge(limit, max(self.exponent, self._at(last)), last + 1)
        return np.linspace(low, high, _GRID), limit

    def _at(self, place: int) -> float:
        return float(self._grid[min(max(place, 0), _GRID - 1)])

    def _edge(self, limit: float, fitting: float, place: int) -> float:
        """Bisect for the exponent where laws cease to fit, from a fitting one to a grid point.

        Returns the fitting exponent if the grid ends there.
        """
        if not 0 <= place < _GRID:
            return fitting
        good, bad = fitting, self._at(place)
        for _ in range(_BISECTIONS):
            middle = (good + bad) / 2
            if self._solve(np.array([middle])).squares[0] <= limit:
                good = middle
            else:
                bad = middle
        return good

    def _search(self) -> float:
        """Return the exponent with the least sum of squares: of the grid, then by zooming in."""
        grid: Array = self._grid
        for _ in range(_ZOOMS):
            place = int(self._solve(grid).squares.argmin())
            low, high = float(grid[max(place - 1, 0)]), float(grid[min(place + 1, len(grid) - 1)])
            grid = np.linspace(low, high, _ZOOM_GRID, dtype=np.float64)
        return float(grid[int(self._solve(grid).squares.argmin())])

    def _solve(self, alphas: Array) -> "_Solved":
        """Return the best law for each exponent."""
        # Columns of the linear problem floor * c1 + scale * c2 = 1, a row for each point.
        c1 = self._weights
        c2: Array = c1 * np.exp(-alphas[:, None] * (self._logs - self._centre))
        plain = _solve_plain(c2)
        if not self._has_floor:
            return _Solved(
                floor=np.zeros_like(alphas), scale=plain.scale, squares=plain.squares, plain=plain
            )
        free = _solve_free(c1, c2)
        # Where the best floor is negative, the best law that is allowed has a floor of 0.
        is_law = (free.floor >= 0) & (free.scale > 0)
        return _Solved(
            floor=np.where(is_law, free.floor, 0.0),
            scale=np.where(is_law, free.scale, plain.scale),
            squares=np.where(is_law, free.squares, plain.squares),
            plain=plain,
            free=free,
        )


@dataclass(frozen=True, kw_only=True)
class _Plain:
    """The best law without a floor, for each of several exponents."""

    scale: Array  # of the power of x over the points' geometric mean
    squares: Array  # sum of squared residuals
    variance: Array  # of scale, for residuals of variance 1


@dataclass(frozen=True, kw_only=True)
class _Free:
    """The best law with a floor of either sign, for each of several exponents."""

    floor: Array
    scale: Array
    squares: Array
    overlap: Array  # coefficient of the projection of the power on the constant
    constant_variance: float
    scale_variance: Array

    @property
    def floor_variance(self) -> Array:
        return self.constant_variance + self.overlap**2 * self.scale_variance


@dataclass(frozen=True, kw_only=True)
class _Solved:
    """The best law that is allowed, for each of several exponents."""

    floor: Array
    scale: Array
    squares: Array
    plain: _Plain
    free: _Free | None = None


def _solve_plain(c2: Array) -> _Plain:
    variance = 1.0 / (c2**2).sum(1)
    scale = c2.sum(1) * variance
    return _Plain(scale=scale, squares=((scale[:, None] * c2 - 1.0) ** 2).sum(1), variance=variance)


def _solve_free(c1: Array, c2: Array) -> _Free:
    # Gram-Schmidt instead of the normal equations: at flat exponents the power is nearly constant,
    # and the two columns nearly parallel.
    constant = float(c1 @ c1)
    overlap = (c2 @ c1) / constant
    rest = c2 - overlap[:, None] * c1  # the part of the power that is orthogonal to the constant
    variance = 1.0 / np.maximum((rest**2).sum(1), 1e-300)
    scale = rest.sum(1) * variance
    floor = float(c1.sum()) / constant - scale * overlap
    residuals = floor[:, None] * c1 + scale[:, None] * c2 - 1.0
    return _Free(
        floor=floor,
        scale=scale,
        squares=(residuals**2).sum(1),
        overlap=overlap,
        constant_variance=1.0 / constant,
        scale_variance=variance,
    )


def _plain_ends(plain: _Plain, phi: Array, limit: float) -> Array:
    """Return the least and the largest y of laws without a floor that fit; phi is x^-exponent."""
    fits = plain.squares <= limit
    reach = np.sqrt(np.maximum(limit - plain.squares, 0.0) * plain.variance)
    return np.concatenate([(phi * (plain.scale + sign * reach))[fits] for sign in (-1, 1)])


def _free_ends(free: _Free, phi: Array, limit: float) -> Array:
    """Return the least and the largest y of laws with a floor that fit; phi is x^-exponent.

    For each exponent the laws that fit are an ellipse in (floor, scale).
    """
    lean = phi - free.overlap
    variance = free.constant_variance + lean**2 * free.scale_variance
    reach = np.sqrt(np.maximum(limit - free.squares, 0.0) * variance)
    shift = (free.constant_variance - free.overlap * lean * free.scale_variance) / variance
    found: list[Array] = []
    # An end with a floor below 0 is left out: there the last law that is allowed has no floor, and
    # _plain_ends has it.
    for way in (-reach, reach):
        is_law = (free.squares <= limit) & (free.floor + way * shift >= 0)
        found.append((free.floor + phi * free.scale + way)[is_law])
    return np.concatenate(found)
