"""The loss or reward of a training stage as a picture for Prefect's pages.

A stage's picture is a PNG inside a data: address, which needs no host for images. Of a whole run it
is one chart in Mermaid's language for each stage, which Prefect's pages draw themselves.
"""

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flows.render.charts import Chart, Points, thin
from flows.render.vega import LIGHT, png
from flows.stages import Quantity, curves_of

_WIDTH, _HEIGHT = 380, 200  # of one chart, in CSS pixels; two charts are about 60 kB
_MOST_POINTS = 40  # of a Mermaid chart
# Mermaid's default line is a pale cream, which is invisible on a light page.
_MERMAID_STYLE = {
    "xyChart": {"width": 640, "height": 260},
    "themeVariables": {
        "xyChart": {
            "backgroundColor": LIGHT["card"],
            "plotColorPalette": LIGHT["accent"],
            **dict.fromkeys(
                [f"{axis}Axis{part}Color" for axis in "xy" for part in ("Label", "Tick", "Line")],
                LIGHT["muted"],
            ),
            **dict.fromkeys(["xAxisTitleColor", "yAxisTitleColor"], LIGHT["muted"]),
        }
    },
}


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


def png_url(shown: Sequence[tuple[Quantity, Points]]) -> str:
    """Return the charts side by side as a data: address. Takes 0.4 s, the first time 1.6 s."""
    charts = (Chart(quantity=quantity, curves=[points]) for quantity, points in shown)
    drawing = png(chart.panel(LIGHT, _WIDTH, _HEIGHT) for chart in charts)
    return "data:image/png;base64," + base64.b64encode(drawing).decode()


def mermaid(shown: Sequence[tuple[Quantity, Points]]) -> str:
    """Return the charts as markdown, one below the other."""
    return "\n\n".join(_mermaid_chart(quantity, points) for quantity, points in shown)


def _mermaid_chart(quantity: Quantity, points: Points) -> str:
    # Prefect stores the text of an artifact in its database, so it must stay short.
    few = thin(points, _MOST_POINTS)
    low, high = min(value for _, value in few), max(value for _, value in few)
    # 5 % of air above and below; a flat curve needs a range that is not empty.
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    first, last = points[0], points[-1]
    return "\n".join(
        [
            f"**{quantity.title}**, {quantity.caption}: {first[1]:.4g} at step {first[0]}, "
            f"{last[1]:.4g} at step {last[0]}",
            "",
            "```mermaid",
            f"%%{{init: {json.dumps(_MERMAID_STYLE)}}}%%",
            "xychart-beta",
            f'    x-axis "step" {few[0][0]} --> {few[-1][0]}',
            f"    y-axis {low - room:.6g} --> {high + room:.6g}",
            f"    line [{', '.join(f'{value:.6g}' for _, value in few)}]",
            "```",
        ]
    )
