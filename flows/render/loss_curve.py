"""The loss or reward of a training stage as a picture for Prefect's pages.

The picture is an SVG inside a data: address, which needs no host for images. Prefect stores each
twice, with the artifact and in an event.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from flows.render.charts import Chart, Points
from flows.render.vega import picture
from flows.stages import Quantity, curves_of


class LossCurves:
    """Values logged by a stage, by step. Of a step repeated after a stop, the last value counts."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._points: dict[tuple[str, str], dict[int, float]] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        """Add one of the stage's events; events without values are ignored."""
        if event["kind"] not in ("step", "eval"):
            return
        for name, value in event["values"].items():
            # A diverged step logs NaN, which JSON and so Vega-Lite do not have.
            if isinstance(value, int | float) and math.isfinite(value):
                self._points.setdefault((event["kind"], name), {})[event["step"]] = value

    def add_earlier(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Add the events of an earlier execution of the job; steps known already stay."""
        earlier = LossCurves(self._stage)
        for event in events:
            earlier.add(event)
        for key, points in earlier._points.items():
            self._points[key] = points | self._points.get(key, {})

    def shown(self) -> list[tuple[Quantity, Points]]:
        """Return the stage's quantities with their points, if they have two points or more."""
        found = ((q, self._series(q)) for q in _wanted(self._stage))
        return [(quantity, points) for quantity, points in found if len(points) > 1]

    def _series(self, quantity: Quantity) -> Points:
        return sorted(self._points.get((quantity.kind, quantity.name), {}).items())


def _wanted(stage: str) -> Sequence[Quantity]:
    """Return the quantities of `stage`; its loss if the table of stages names none."""
    return curves_of(stage) or [Quantity("step", "loss", f"{stage} loss", "nats per token")]


def picture_url(shown: Sequence[tuple[Quantity, Points]]) -> str:
    """Return the charts side by side as a data: address. Takes 0.4 s, the first time 1.6 s."""
    # Two charts are 15 to 50 kB.
    return data_url(picture(Chart(quantity=what, curves=[points]) for what, points in shown))


def data_url(drawing: str) -> str:
    """Return an SVG as an address that holds it: Prefect's server has no place for files."""
    return "data:image/svg+xml," + quote(drawing, safe="/:;,=()'")
