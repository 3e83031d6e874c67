"""How a loss falls as models grow: y = floor + scale * x^-exponent through a few points.

A range is a profile interval at 95 %: of all laws whose sum of squares is at most
1 + t^2 / freedom times the least one, t being Student's. It tells what scatter like that of these
points allows; whether the law goes on beyond them nobody knows. Points too few for a floor have no
range: one of pure power laws does not hold the exponent of a law with a floor. How the laws are
found: flows/miniseries/law_family.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flows.miniseries.law_family import Range, ScalingFit

FLOOR_NEEDS = 4  # points at different x before a floor is fitted
_NARROW = 10.0  # a smaller ratio of the largest x to the smallest one is said


@dataclass(frozen=True, kw_only=True)
class Law:
    """y = floor + scale * x^-exponent."""

    floor: float  # 0 in a pure power law
    scale: float
    exponent: float
    exponent_range: Range | None  # None: it cannot be told, as where no floor was looked for
    scatter: float | None  # relative distance of a point from it; None: it goes through all points

    def at(self, x: float) -> float:
        """The law's y."""
        return self.floor + self.scale * x**-self.exponent


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a law says of an x that was not measured."""

    value: float
    range: Range | None  # of one more measurement, if there is such a law; None: cannot be told
    beyond: float  # x over the largest x that was measured


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The law of some points, and what they leave open."""

    points: tuple[tuple[float, float], ...]
    law: Law | None  # None: they tell none
    # Floors that fit, where there are points enough to tell; from 0 on: it is not determined.
    floor_range: Range | None
    doubts: tuple[str, ...]  # a sentence each

    def predict(self, x: float) -> Prediction | None:
        """What the law says of `x`. The range allows for a floor; where none was looked for, there
        is no range."""
        if self.law is None:
            return None
        value = self.law.at(x)
        beyond = x / max(known for known, _ in self.points)
        if self.floor_range is None:
            return Prediction(value=value, range=None, beyond=beyond)
        family = ScalingFit(self.points, has_floor=True)
        fitting = family.values_at(x)
        noise = family.student * family.scatter * value
        low = value - math.hypot(max(value - fitting.low, 0.0), noise)
        high = value + math.hypot(max(fitting.high - value, 0.0), noise)
        return Prediction(value=value, range=Range(low=max(low, 0.0), high=high), beyond=beyond)


def fit_law(points: Sequence[tuple[float, float]]) -> Fit:
    """The law of (x, y) pairs, all positive: with a floor where the points tell it, else without.

    The order of the points does not matter, and the same points give the same law.
    """
    points = tuple(sorted((float(x), float(y)) for x, y in points))
    assert all(math.isfinite(x) and math.isfinite(y) and x > 0 and y > 0 for x, y in points)
    places = len({x for x, _ in points})
    if places < 2:
        return _no_law(points, f"no law: it takes two models of different size, here is {places}")
    plain = ScalingFit(points, has_floor=False)
    if not _falls(points):
        return _no_law(points, "no law: the larger models are no better")
    if places < FLOOR_NEEDS:
        return Fit(
            points=points,
            law=_law(plain, among=None),
            floor_range=None,
            doubts=(*_few(places), *_any(plain)),
        )
    full = ScalingFit(points, has_floor=True)
    floors = full.floors()
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
    """Whether a straight line through the logarithms falls."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    x_mean, y_mean = (math.fsum(column) / len(logs) for column in zip(*logs, strict=True))
    return math.fsum((x - x_mean) * (y - y_mean) for x, y in logs) < 0


def _law(family: ScalingFit, *, among: ScalingFit | None) -> Law:
    """The best of the family, with the exponents of all laws `among` which it was chosen.

    None: laws with a floor were not looked at, so which exponents fit is not known.
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
        "line falls too low far out"
    ]
    if places == 2:
        doubts.append("a line through two points is always exact: how sure it is cannot be told")
    else:
        doubts.append("how sure exponent and predictions are cannot be told without a floor")
    return doubts


def _unknown(floors: Range) -> str:
    return (
        f"the floor is not determined: all from 0 to {floors.high:.3g} fit; the line is drawn "
        "without one, so far out it is the lowest that fits"
    )


def _any(family: ScalingFit) -> list[str]:
    """What is said of the points whatever their law."""
    doubts: list[str] = []
    if (ratio := math.exp(family.span)) < _NARROW:
        doubts.append(f"the largest model is only {ratio:.1f} times the smallest one")
    if family.freedom >= 1 and family.is_open:
        doubts.append("the exponent is not determined: nearly any fits")
    return doubts
