"""The plot of a sweep: each point's difference from the base, with its interval."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flows.render.score import Delta
from flows.render.vega import IN_PAGE, LIGHT, Colours, Layer, Panel, channel, layer, png, svg

_ROW = 30  # pixels of a point
_LABEL = 190  # pixels of the labels; longer ones are cut


@dataclass(frozen=True, kw_only=True)
class PlottedPoint:
    """A point in the plot."""

    label: str
    mean: Delta  # difference from the base
    seeds: Sequence[float]  # the differences that it is the mean of


@dataclass(frozen=True, kw_only=True)
class DifferencePlot:
    """A row for each point: the differences of its seeds, their mean and its interval."""

    title: str
    caption: str
    axis: str
    points: Sequence[PlottedPoint]

    def svg(self) -> str:
        """Return the plot as SVG for a page."""
        left = min(_LABEL, 7 * max(len(point.label) for point in self.points)) + 14
        padding = {"left": left, "right": 16, "top": 8, "bottom": 44}
        return svg(self._panel(IN_PAGE, 520 - left), padding=padding)

    def png(self) -> bytes:
        """Return the plot as PNG, with its title."""
        return png([self._panel(LIGHT, 560)], scale=2.0)

    def _panel(self, colours: Colours, width: int) -> Panel:
        return Panel(
            title=self.title,
            caption=self.caption,
            layers=list(self._layers(colours)),
            width=width,
            height=_ROW * len(self.points),
        )

    def _layers(self, colours: Colours) -> Iterator[Layer]:
        low, high = self._range()
        scale = {"domain": [low, high], "nice": False, "zero": False}
        x = channel("x", scale=scale, title=self.axis, tickCount=6, format="~g")
        y: dict[str, Any] = {
            **{"field": "label", "type": "nominal", "sort": None},
            "axis": {"title": None, "labelLimit": _LABEL, "domain": False, "ticks": False},
        }
        style: dict[str, Any] = {"stroke": colours["accent"], "strokeWidth": 1.5}
        yield layer([{"x": 0}], "rule", {**style, "strokeDash": [4, 4]}, x=x)
        single = [{"label": p.label, "x": value} for p in self.points for value in p.seeds]
        faint = {"size": 30, "fill": colours["muted"], "opacity": 0.45}
        yield layer(single, "circle", faint, x=x, y=y)
        # Cut at the axis: Vega-Lite would draw the rule beyond the plot.
        bars = [
            {"label": p.label, "low": max(p.mean.low, low), "high": min(p.mean.high, high)}
            for p in self.points
            if p.mean.low is not None and p.mean.high is not None
        ]
        span = {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y}
        ink = colours["ink"]
        yield layer(bars, "rule", {"stroke": ink, "strokeWidth": 1.5}, **span)
        means = [{"label": p.label, "x": p.mean.value} for p in self.points]
        yield layer(means, "circle", {"size": 70, "fill": ink, "opacity": 1}, x=x, y=y)

    def _range(self) -> tuple[float, float]:
        """Return the range of the x axis: all differences and 0, with half as much on each side.

        An interval of two seeds may be many times as long: it would hide where the points are.
        """
        known = [0.0, *(value for point in self.points for value in point.seeds)]
        beyond = (max(known) - min(known)) / 2 or 0.1
        return min(known) - beyond, max(known) + beyond
