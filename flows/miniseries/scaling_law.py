"""Scaling laws of loss by model size: y = floor + scale * x^-exponent, fitted to a few points.

A range is a profile interval at 95 %: it covers all laws whose sum of squares is at most
1 + t^2 / freedom times the least one, t being Student's. It shows what scatter like that of these
points allows, and assumes that the law holds beyond them. flows/miniseries/law_family.py does the
fitting.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flows.miniseries.law_family import Range, ScalingFit

FLOOR_NEEDS = 4  # points at different x before a floor is fitted
_NARROW = 10.0  # a smaller ratio of the largest x to the smallest one is reported as a doubt


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
class Fit:
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
        beyond = x / max(known for known, _ in self.points)
        if self.floor_range is None:
            return Prediction(value=value, range=None, beyond=beyond)
        family = ScalingFit(self.points, has_floor=True)
        fitting = family.values_at(x)
        # The range of a measurement: the uncertainty of the law and the scatter of one point about
        # it are independent, so they add in quadrature.
        noise = family.student * family.scatter * value
        low = value - math.hypot(max(value - fitting.low, 0.0), noise)
        high = value + math.hypot(max(fitting.high - value, 0.0), noise)
        return Prediction(value=value, range=Range(low=max(low, 0.0), high=high), beyond=beyond)


def fit_law(points: Sequence[tuple[float, float]]) -> Fit:
    """Fit a law to (x, y) pairs, all positive: with a floor if the points determine one.

    The result does not depend on the order of the points.
    """
    # Sorted, since sums of floats depend on their order.
    points = tuple(sorted((float(x), float(y)) for x, y in points))
    assert all(math.isfinite(x) and math.isfinite(y) and x > 0 and y > 0 for x, y in points)
    places = len({x for x, _ in points})
    if places < 2:
        return _no_law(points, f"no law: it takes two models of different size, here is {places}")
    plain = ScalingFit(points, has_floor=False)
    if not _falls(points):
        return _no_law(points, "no law: the larger models are no better")
    # No range here: that of pure power laws alone would leave out the exponents of laws with a
    # floor, and so be too narrow.
    if places < FLOOR_NEEDS:
        return Fit(
            points=points,
            law=_law(plain, among=None),
            floor_range=None,
            doubts=(*_few(places), *_any(plain)),
        )
    full = ScalingFit(points, has_floor=True)
    floors = full.floors()
    # If a floor of 0 fits too, the simpler law without one is drawn.
    is_known = floors.low > 0
    doubts = () if is_known else (_unknown(floors),)
    return Fit(
        points=points,
        law=_law(full if is_known else plain, among=full),
        floor_range=floors,
        doubts=(*doubts, *_any(full)),
    )


def _no_law(points: tuple[tuple[float, float], ...], why: str) -> Fit:
    return Fit(points=points, law=None, floor_range=None, doubts=(why,))


def _falls(points: Sequence[tuple[float, float]]) -> bool:
    """Return whether a straight line through the logarithms falls."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    x_mean, y_mean = (math.fsum(column) / len(logs) for column in zip(*logs, strict=True))
    return math.fsum((x - x_mean) * (y - y_mean) for x, y in logs) < 0


def _law(family: ScalingFit, *, among: ScalingFit | None) -> Law:
    """Return the best law of the family, with the range of exponents of the laws in `among`.

    None means that laws with a floor were not fitted, so the range is unknown.
    """
    return Law(
        floor=family.floor,
        scale=family.scale,
        exponent=family.exponent,
        exponent_range=None if among is None else among.exponents(),
        scatter=family.scatter if family.freedom >= 1 else None,
    )


def _few(places: int) -> list[str]:
    doubts = [
        f"no floor is fitted: it takes {FLOOR_NEEDS} models, here are {places}; without one the "
        "line is too low far beyond the points"
    ]
    if places == 2:
        doubts.append("a line through two points is always exact: its uncertainty is unknown")
    else:
        doubts.append("uncertainties of exponent and predictions are unknown without a floor")
    return doubts


def _unknown(floors: Range) -> str:
    return (
        f"the floor is not determined: all from 0 to {floors.high:.3g} fit; the line is drawn "
        "without one, so far beyond the points it is the lowest that fits"
    )


def _any(family: ScalingFit) -> list[str]:
    """Return doubts that hold with and without a floor."""
    doubts: list[str] = []
    if (ratio := math.exp(family.span)) < _NARROW:
        doubts.append(f"the largest model is only {ratio:.1f} times the smallest one")
    if family.freedom >= 1 and family.is_open:
        doubts.append("the exponent is not determined: nearly any fits")
    return doubts
