"""The plots of a series: bits per byte against the cost of a model, with the fitted law."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flows.miniseries.findings import Findings, Next, formula
from flows.miniseries.points import Point
from flows.miniseries.scaling_law import ScalingFit
from flows.render.score import Score
from flows.render.vega import IN_PAGE, LIGHT, Colours, Layer, Panel, channel, layer, png, svg

PNG_SCALE = 2.0
PADDING = {"left": 58, "right": 22, "top": 12, "bottom": 44}
_CURVE_POINTS = 101
_MARGIN = 0.12  # share of the data's range that an axis extends beyond it at either end


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A model in the plot: measured, or predicted."""

    label: str
    x: float
    score: Score


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A plot of bits per byte against one measure of a model."""

    title: str
    caption: str
    axis: str
    form: str  # d3's format of the numbers on the axis
    fit: ScalingFit
    dots: Sequence[Dot]
    predicted: Sequence[Dot]

    def svg(self) -> str:
        """Return the plot as SVG for a page."""
        return svg(self._panel(IN_PAGE, 460, 260), padding=PADDING)

    def png(self) -> bytes:
        """Return the plot as PNG, with its title."""
        return png([self._panel(LIGHT, 680, 380)], scale=PNG_SCALE)

    def _panel(self, colours: Colours, width: int, height: int) -> Panel:
        layers = list(self._layers(colours))
        return Panel(
            title=self.title, caption=self.caption, layers=layers, width=width, height=height
        )

    def _layers(self, colours: Colours) -> Iterator[Layer]:
        x_range, y_range = self._x_range(), self._y_range()
        x = channel(
            "x",
            scale={"type": "log", "domain": x_range, "nice": False},
            title=self.axis,
            values=_ticks(*x_range),
            format=self.form,
            labelExpr="replace(datum.label, 'e+', 'e')",  # 1e20 instead of d3's 1e+20
            grid=False,
        )
        # Without zero: losses differ by a few per cent, and would be one flat line.
        scale = {"zero": False, "domain": y_range, "nice": False}
        axis = {"title": None, "tickCount": 6, "format": "~g", "domain": False, "ticks": False}
        y = channel("y", scale=scale, **axis)
        span = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
        if self.fit.law is not None:
            least, most = (end(dot.x for dot in self.dots) for end in (min, max))
            # Solid among the measured points, dashed beyond them.
            for low, high, dash in ((least, most, [1, 0]), (most, x_range[1], [4, 4])):
                style = {"stroke": colours["accent"], "strokeWidth": 2, "strokeDash": dash}
                yield layer(_curve(self.fit, low, high, y_range), "line", style, x=x, y=y)
        for dots, colour, fill, dash in (
            (self.predicted, colours["mark"], colours["card"], [2, 3]),
            (self.dots, colours["ink"], colours["ink"], [1, 0]),
        ):
            # Cut at the axis: Vega-Lite would draw the rule beyond the plot.
            bars = [
                {"x": dot.x, "low": max(low, y_range[0]), "high": min(high, y_range[1])}
                for dot in dots
                if (low := dot.score.low) is not None and (high := dot.score.high) is not None
            ]
            style = {"stroke": colour, "strokeWidth": 1.5, "strokeDash": dash}
            yield layer(bars, "rule", style, **span)
            values: list[dict[str, Any]] = [
                {"x": dot.x, "y": dot.score.value, "label": dot.label} for dot in dots
            ]
            style = {"size": 70, "stroke": colour, "fill": fill, "strokeWidth": 2, "opacity": 1}
            yield layer(values, "circle", style, x=x, y=y)
            # Labels of points below the falling line go below it: above they would be on the line.
            law = self.fit.law
            below = [value for value in values if law and value["y"] < law.at(value["x"])]
            above = [value for value in values if value not in below]
            text = {"field": "label", "type": "nominal"}
            for placed, dx, dy, align in ((above, 9, -9, "left"), (below, -9, 14, "right")):
                style = {"fill": colour, "dx": dx, "dy": dy, "align": align, "fontSize": 13}
                yield layer(placed, "text", style, x=x, y=y, text=text)

    def _x_range(self) -> tuple[float, float]:
        known = [dot.x for dot in (*self.dots, *self.predicted)]
        low, high = min(known, default=1.0), max(known, default=10.0)
        beyond = (high / low) ** _MARGIN if high > low else 2.0
        return low / beyond, high * beyond

    def _y_range(self) -> tuple[float, float]:
        """Return the range of the y axis: all measured and predicted values, and a margin."""
        # Without predicted ranges, which may be so wide that the points would be a flat line.
        known = [dot.score.value for dot in (*self.dots, *self.predicted)]
        ends = [end for dot in self.dots for end in (dot.score.low, dot.score.high)]
        known += [end for end in ends if end is not None]
        low, high = min(known, default=0.0), max(known, default=1.0)
        beyond = (high - low) * _MARGIN or 0.1
        return low - beyond, high + beyond


def pictures(findings: Findings) -> tuple[Picture, Picture]:
    """Return the plots by FLOPs and by parameters."""
    by_flops = Picture(
        title=f"Miniseries {findings.name}",
        caption=_caption(findings.by_flops, "C"),
        axis="C, FLOPs of training",
        form="~e",
        fit=findings.by_flops,
        dots=_dots(findings, lambda point: point.size.flops),
        predicted=[_predicted(findings.next)] if findings.next else [],
    )
    by_parameters = replace(
        by_flops,
        caption=_caption(findings.by_parameters, "N"),
        axis="N, parameters of matrices and lm_head",
        form="~s",
        fit=findings.by_parameters,
        dots=_dots(findings, lambda point: point.size.scaling_parameters),
        predicted=[],
    )
    return by_flops, by_parameters


def _caption(fit: ScalingFit, symbol: str) -> str:
    line = f"; the line is {formula(fit.law, symbol)}" if fit.law else ""
    return f"bits per byte of held-out text{line}"


def _dots(findings: Findings, x: Callable[[Point], float]) -> list[Dot]:
    return [Dot(label=f"d{p.depth}", x=x(p), score=p.val_bpb) for p in findings.points]


def _predicted(after: Next) -> Dot:
    value, known = after.prediction.value, after.prediction.range
    low, high = (known.low, known.high) if known else (None, None)
    label = f"d{after.depth}?"
    return Dot(label=label, x=after.size.flops, score=Score(value=value, low=low, high=high))


def _curve(
    fit: ScalingFit, low: float, high: float, y_range: tuple[float, float]
) -> Iterator[dict[str, float]]:
    assert fit.law is not None
    for i in range(_CURVE_POINTS):
        x = low * (high / low) ** (i / (_CURVE_POINTS - 1))  # even steps on a log axis
        y = round(fit.law.at(x), 6)
        if y_range[0] <= y <= y_range[1]:
            yield {"x": x, "y": y}


def _ticks(low: float, high: float) -> list[float]:
    """Return powers of ten in the range; with fewer than three, also multiples between them."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
        ticks = (step * 10.0**decade for decade in decades for step in steps)
        found = [tick for tick in ticks if low <= tick <= high]
        if len(found) >= 3:
            break
    return found
