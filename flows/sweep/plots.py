"""The plots of a sweep: differences from its base, and of a sweep over depths the scaling law."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from flows.profiles import open_profile
from flows.render.paired import Delta, Score
from flows.render.vega import COLOURS, Layer, Panel, channel, layer
from flows.sweep.grid import Size, size_of
from flows.sweep.law import ScalingFit, fit_law
from nanochat_core.config import RunConfig
from nanochat_core.errors import ConfigError

_CURVE_POINTS = 101
_ROW = 30  # pixels of a point
_LABEL = 190  # pixels of the labels; longer ones are cut
# What a loss falls with: its name and symbol, the title of its axis, d3's format of its numbers.
Axis: TypeAlias = tuple[str, str, str, str]
FLOPS: Axis = ("FLOPs", "C", "FLOPs of training", "~e")
PARAMETERS: Axis = ("scaling parameters", "N", "parameters of matrices and lm_head", "~s")
_MARGIN = 0.12  # share of the data's range that an axis extends beyond it at either end


def difference_panel(
    points: Sequence[tuple[str, Delta, Sequence[float]]], title: str, axis: str, *, better: str
) -> Panel:
    """Return a row for each point: the differences of its seeds, their mean and its interval.

    `points` are labels, means and single differences, at least one; `better` is less or more.
    """
    left = min(_LABEL, 7 * max(len(label) for label, _, _ in points)) + 14
    # All differences and 0, with half as much on each side: an interval of two seeds may be many
    # times as long, and would hide where the points are.
    known = [0.0, *(value for _, _, seeds in points for value in seeds)]
    beyond = (max(known) - min(known)) / 2 or 0.1
    low, high = min(known) - beyond, max(known) + beyond
    scale = {"domain": [low, high], "nice": False, "zero": False}
    x = channel("x", scale=scale, title=axis, tickCount=6, format="~g")
    y: dict[str, Any] = {
        **{"field": "label", "type": "nominal", "sort": None},
        "axis": {"title": None, "labelLimit": _LABEL, "domain": False, "ticks": False},
    }
    # Cut at the axis: Vega-Lite would draw the rule beyond the plot.
    bars = [
        {"label": label, "low": max(mean.low, low), "high": min(mean.high, high)}
        for label, mean, _ in points
        if mean.low is not None and mean.high is not None
    ]
    span = {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y}
    single = [{"label": label, "x": value} for label, _, seeds in points for value in seeds]
    means = [{"label": label, "x": mean.value} for label, mean, _ in points]
    zero = {"stroke": COLOURS["accent"], "strokeWidth": 1.5, "strokeDash": [4, 4]}
    faint = {"size": 30, "fill": COLOURS["muted"], "opacity": 0.45}
    ink = COLOURS["ink"]
    return Panel(
        title=title,
        caption=f"mean and 95 % interval, cut at the edge; faint: single seeds; {better} is better",
        layers=[
            layer([{"x": 0}], "rule", zero, x=x),
            layer(single, "circle", faint, x=x, y=y),
            layer(bars, "rule", {"stroke": ink, "strokeWidth": 1.5}, **span),
            layer(means, "circle", {"size": 70, "fill": ink, "opacity": 1}, x=x, y=y),
        ],
        width=520 - left,
        height=_ROW * len(points),
        padding={"left": left, "right": 16, "top": 8, "bottom": 44},
    )


def law_panel(
    fit: ScalingFit, labels: Sequence[str], expected: Sequence["Expected"], axis: Axis
) -> Panel:
    """Return the measured points with their labels, the law through them, and predictions."""
    name, symbol, *_ = axis
    line = f"; the line is {fit.law.formula(symbol)}" if fit.law else ""
    return Panel(
        title=f"Loss by {name}",
        caption=f"bits per byte of held-out text{line}",
        layers=list(_law_layers(fit, labels, expected, axis)),
        width=460,
        height=260,
        padding={"left": 58, "right": 22, "top": 12, "bottom": 44},
    )


def _law_layers(
    fit: ScalingFit, labels: Sequence[str], expected: Sequence["Expected"], axis: Axis
) -> Iterator[Layer]:
    _, symbol, title, form = axis
    measured: list[dict[str, Any]] = [
        {"x": x, "y": y, "label": label} for label, (x, y) in zip(labels, fit.points, strict=True)
    ]
    predicted: list[dict[str, Any]] = [
        {"x": e.flops, "y": e.prediction.value, "label": f"d{e.depth}?"} for e in expected
    ]
    # Without predicted ranges, which may be so wide that the points would be a flat line.
    shown = [*measured, *predicted]
    (left, right), (low, high) = ((min(v), max(v)) for v in ([p[k] for p in shown] for k in "xy"))
    across = (right / left) ** _MARGIN if right > left else 2.0
    beyond = (high - low) * _MARGIN or 0.1
    left, right, low, high = left / across, right * across, low - beyond, high + beyond
    x = channel(
        "x",
        scale={"type": "log", "domain": [left, right], "nice": False},
        title=f"{symbol}, {title}",
        tickCount=5,
        format=form,
        labelExpr="replace(datum.label, 'e+', 'e')",  # 1e20 instead of d3's 1e+20
        grid=False,
    )
    # Without zero: losses differ by a few per cent, and would be one flat line.
    scale = {"zero": False, "domain": [low, high], "nice": False}
    y = channel("y", scale=scale, title=None, tickCount=6, format="~g", domain=False, ticks=False)
    if fit.law is not None:
        smallest, largest = fit.points[0][0], fit.points[-1][0]
        # Solid among the measured points, dashed beyond them.
        for begin, end, dash in ((smallest, largest, [1, 0]), (largest, right, [4, 4])):
            style = {"stroke": COLOURS["accent"], "strokeWidth": 2, "strokeDash": dash}
            steps = map(float, np.geomspace(begin, end, _CURVE_POINTS))  # even on a log axis
            curve = [{"x": step, "y": round(fit.law.at(step), 6)} for step in steps]
            yield layer([p for p in curve if low <= p["y"] <= high], "line", style, x=x, y=y)
    # Cut at the axis, as above.
    bars = [
        {"x": e.flops, "low": max(e.prediction.low, low), "high": min(e.prediction.high, high)}
        for e in expected
        if e.prediction.low is not None and e.prediction.high is not None
    ]
    span = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    style = {"stroke": COLOURS["mark"], "strokeWidth": 1.5, "strokeDash": [2, 3]}
    yield layer(bars, "rule", style, **span)
    text = {"field": "label", "type": "nominal"}
    for values, colour, fill in ((predicted, "mark", "card"), (measured, "ink", "ink")):
        ink = COLOURS[colour]
        style = {"size": 70, "stroke": ink, "fill": COLOURS[fill], "strokeWidth": 2, "opacity": 1}
        yield layer(values, "circle", style, x=x, y=y)
        style = {"fill": ink, "dx": 9, "dy": -9, "align": "left", "fontSize": 13}
        yield layer(values, "text", style, x=x, y=y, text=text)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The prediction of a law for one depth."""

    depth: int
    flops: float
    prediction: Score
    beyond: float  # `flops` over the largest that were measured
    measured: float | None  # None: the depth was not trained

    @property
    def sentence(self) -> str:
        """The prediction for people."""
        found = self.prediction
        text = f"d{self.depth} would be {found.value:.4f} "
        text += f"({found.interval or 'uncertainty unknown'})"
        if self.measured is None:
            beyond = f"{self.beyond:.3g} times beyond the largest"
            return f"{text} with {self.flops:.3g} FLOPs: an extrapolation, {beyond}"
        side = ""
        if found.low is not None and found.high is not None:
            side = ", inside" if found.low <= self.measured <= found.high else ", outside"
        return f"from the smaller models {text}; it is {self.measured:.4f}{side}"


@dataclass(frozen=True, kw_only=True)
class Series:
    """The laws of the depths that were evaluated."""

    sizes: Mapping[int, Size]  # by depth, the smallest first
    losses: Mapping[int, float]
    by_flops: ScalingFit
    by_parameters: ScalingFit  # of the scaling parameters
    expected: tuple[Expected, ...]  # the largest depth from the others, and the next depth

    @property
    def panels(self) -> list[Panel]:
        """The plots by FLOPs and by parameters."""
        labels = [f"d{depth}" for depth in self.sizes]
        ahead = [each for each in self.expected if each.measured is None]
        return [
            law_panel(self.by_flops, labels, ahead, FLOPS),
            law_panel(self.by_parameters, labels, [], PARAMETERS),
        ]

    def sentences(self) -> Iterator[str]:
        """Yield the laws as sentences for people, doubts included."""
        for (what, symbol, *_), fit in ((FLOPS, self.by_flops), (PARAMETERS, self.by_parameters)):
            if fit.law is not None:
                text = f"by {what}: val_bpb = {fit.law.formula(symbol)}"
                yield f"{text}{_certainty(fit)}"
            # Both fits mostly have the same doubts: those of the second only if it has no law.
            if symbol == "C" or fit.law is None:
                yield from (f"by {what}: {doubt}" for doubt in fit.doubts)
        yield from (each.sentence for each in self.expected)
        ratios = [size.tokens / size.scaling_parameters for size in self.sizes.values()]
        # Training ends at whole steps, so equal ratios come out a little unequal.
        if ratios and max(ratios) > 1.1 * min(ratios):
            yield (
                f"note: tokens per parameter go from {max(ratios):.3g} to {min(ratios):.3g}: a law "
                "of this series is not one of models that are each trained in proportion to their "
                "size"
            )


def series_of(
    losses: Mapping[int, float],
    runs: Mapping[int, RunConfig],
    *,
    profile: str,
    overrides: Sequence[str],
) -> Series:
    """Fit the laws to the losses by depth. The same losses give the same series."""
    sizes = {depth: size_of(runs[depth]) for depth in sorted(losses)}
    points = [(size.flops, losses[depth]) for depth, size in sizes.items()]
    by_flops = fit_law(points)
    expected: list[Expected] = []
    if len(points) > 2:  # two smaller models are the fewest that determine a law
        smaller = fit_law(points[:-1])
        expected += _expect(smaller, max(sizes), points[-1][0], measured=points[-1][1])
    if len(points) > 1:
        # As far beyond the largest depth as that is from the one before.
        *_, before, last = sizes
        try:
            after = open_profile(
                profile, depth=2 * last - before, overrides=overrides, snapshots=False
            )
            expected += _expect(by_flops, 2 * last - before, size_of(after.run).flops)
        except ConfigError:  # too many layers
            pass
    return Series(
        sizes=sizes,
        losses={depth: losses[depth] for depth in sizes},
        by_flops=by_flops,
        by_parameters=fit_law([(s.scaling_parameters, losses[d]) for d, s in sizes.items()]),
        expected=tuple(expected),
    )


def _expect(
    fit: ScalingFit, depth: int, flops: float, measured: float | None = None
) -> list[Expected]:
    found = fit.predict(flops)
    if found is None:
        return []
    beyond = flops / fit.points[-1][0]
    return [Expected(depth=depth, flops=flops, prediction=found, beyond=beyond, measured=measured)]


def _certainty(fit: ScalingFit) -> str:
    parts: list[str] = []
    # A range that reaches an end of the search is no range: a doubt reports it instead.
    if fit.exponent_range and not any(doubt.startswith("the exponent") for doubt in fit.doubts):
        parts.append("exponent {:.3g} to {:.3g}".format(*fit.exponent_range))
    if fit.law is not None and fit.floor_range and fit.law.floor:
        parts.append("floor {:.3g} to {:.3g}".format(*fit.floor_range))
    if fit.law is not None and fit.law.scatter is not None:
        parts.append(f"scatter {100 * fit.law.scatter:.2g} %")
    return f" ({', '.join(parts)})" if parts else ""
