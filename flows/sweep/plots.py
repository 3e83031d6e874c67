"""The plots of a sweep: differences from its base, and of a sweep over depths the scaling law."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flows.profiles import open_profile
from flows.render.paired import Delta
from flows.render.vega import Colours, Layer, Panel, channel, layer
from flows.sweep.grid import Size, size_of
from flows.sweep.law import Prediction, ScalingFit, fit_law
from nanochat_core.config import RunConfig
from nanochat_core.errors import ConfigError

_CURVE_POINTS = 101
_ROW = 30  # pixels of a point
_LABEL = 190  # pixels of the labels; longer ones are cut
_MARGIN = 0.12  # share of the data's range that an axis extends beyond it at either end


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

    def panel(self, colours: Colours) -> Panel:
        """Return the plot with its title, in these colours."""
        left = min(_LABEL, 7 * max(len(point.label) for point in self.points)) + 14
        return Panel(
            title=self.title,
            caption=self.caption,
            layers=list(self._layers(colours)),
            width=520 - left,
            height=_ROW * len(self.points),
            padding={"left": left, "right": 16, "top": 8, "bottom": 44},
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


@dataclass(frozen=True, kw_only=True)
class LawPlot:
    """The measured points, the law through them, and predictions."""

    title: str
    axis: str
    form: str  # d3's format of the numbers on the axis
    symbol: str  # of x in the formula
    fit: ScalingFit
    labels: Sequence[str]  # of the fit's points
    next: Sequence[tuple[str, float, Prediction]]  # label and x of models that were not trained

    @property
    def caption(self) -> str:
        """The quantity of the y axis, and the law."""
        line = f"; the line is {self.fit.law.formula(self.symbol)}" if self.fit.law else ""
        return f"bits per byte of held-out text{line}"

    def panel(self, colours: Colours) -> Panel:
        """Return the plot with its title, in these colours."""
        return Panel(
            title=self.title,
            caption=self.caption,
            layers=list(self._layers(colours)),
            width=460,
            height=260,
            padding={"left": 58, "right": 22, "top": 12, "bottom": 44},
        )

    def _layers(self, colours: Colours) -> Iterator[Layer]:
        measured: list[dict[str, Any]] = [
            {"x": x, "y": y, "label": label}
            for label, (x, y) in zip(self.labels, self.fit.points, strict=True)
        ]
        predicted: list[dict[str, Any]] = [
            {"x": x, "y": p.value, "label": label} for label, x, p in self.next
        ]
        x_range, y_range = self._ranges()
        x = channel(
            "x",
            scale={"type": "log", "domain": x_range, "nice": False},
            title=self.axis,
            tickCount=5,
            format=self.form,
            labelExpr="replace(datum.label, 'e+', 'e')",  # 1e20 instead of d3's 1e+20
            grid=False,
        )
        # Without zero: losses differ by a few per cent, and would be one flat line.
        scale = {"zero": False, "domain": y_range, "nice": False}
        axis = {"title": None, "tickCount": 6, "format": "~g", "domain": False, "ticks": False}
        y = channel("y", scale=scale, **axis)
        if self.fit.law is not None:
            smallest, largest = self.fit.points[0][0], self.fit.points[-1][0]
            # Solid among the measured points, dashed beyond them.
            for low, high, dash in ((smallest, largest, [1, 0]), (largest, x_range[1], [4, 4])):
                style = {"stroke": colours["accent"], "strokeWidth": 2, "strokeDash": dash}
                yield layer(self._curve(low, high, y_range), "line", style, x=x, y=y)
        # Cut at the axis: Vega-Lite would draw the rule beyond the plot.
        bars = [
            {"x": x, "low": max(p.range.low, y_range[0]), "high": min(p.range.high, y_range[1])}
            for _, x, p in self.next
            if p.range
        ]
        span = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
        style = {"stroke": colours["mark"], "strokeWidth": 1.5, "strokeDash": [2, 3]}
        yield layer(bars, "rule", style, **span)
        text = {"field": "label", "type": "nominal"}
        for values, colour, fill in (
            (predicted, colours["mark"], colours["card"]),
            (measured, colours["ink"], colours["ink"]),
        ):
            style = {"size": 70, "stroke": colour, "fill": fill, "strokeWidth": 2, "opacity": 1}
            yield layer(values, "circle", style, x=x, y=y)
            style = {"fill": colour, "dx": 9, "dy": -9, "align": "left", "fontSize": 13}
            yield layer(values, "text", style, x=x, y=y, text=text)

    def _ranges(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the ranges of the axes: all measured and predicted values, and a margin."""
        # Without predicted ranges, which may be so wide that the points would be a flat line.
        known = [*self.fit.points, *((x, p.value) for _, x, p in self.next)]
        (left, right), (low, high) = ((min(v), max(v)) for v in zip(*known, strict=True))
        across = (right / left) ** _MARGIN if right > left else 2.0
        beyond = (high - low) * _MARGIN or 0.1
        return (left / across, right * across), (low - beyond, high + beyond)

    def _curve(
        self, low: float, high: float, y_range: tuple[float, float]
    ) -> Iterator[dict[str, Any]]:
        assert self.fit.law is not None
        for i in range(_CURVE_POINTS):
            x = low * (high / low) ** (i / (_CURVE_POINTS - 1))  # even steps on a log axis
            y = round(self.fit.law.at(x), 6)
            if y_range[0] <= y <= y_range[1]:
                yield {"x": x, "y": y}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The prediction of a law for one depth."""

    depth: int
    flops: float
    prediction: Prediction
    measured: float | None  # None: the depth was not trained

    @property
    def sentence(self) -> str:
        """The prediction for people."""
        known = self.prediction.range
        between = f"{known.low:.4g} to {known.high:.4g}" if known else "uncertainty unknown"
        text = f"d{self.depth} would be {self.prediction.value:.4f} ({between})"
        if self.measured is None:
            beyond = f"{self.prediction.beyond:.3g} times beyond the largest"
            return f"{text} with {self.flops:.3g} FLOPs: an extrapolation, {beyond}"
        side = ""
        if known:
            side = ", inside" if known.low <= self.measured <= known.high else ", outside"
        return f"from the smaller models {text}; it is {self.measured:.4f}{side}"


@dataclass(frozen=True, kw_only=True)
class Series:
    """The laws of the depths that were evaluated."""

    sizes: Mapping[int, Size]  # by depth, the smallest first
    losses: Mapping[int, float]
    by_flops: ScalingFit
    by_parameters: ScalingFit  # of the scaling parameters
    expected: tuple[Expected, ...]  # the largest depth from the others, and the next depth

    def plots(self, title: str) -> list[LawPlot]:
        """Return the plots by FLOPs and by parameters."""
        labels = [f"d{depth}" for depth in self.sizes]
        dots = [
            (f"d{e.depth}?", e.flops, e.prediction) for e in self.expected if e.measured is None
        ]
        return [
            LawPlot(
                title=title, axis=axis, form=form, symbol=symbol, fit=fit, labels=labels, next=dots
            )
            for axis, form, symbol, fit, dots in (
                ("C, FLOPs of training", "~e", "C", self.by_flops, dots),
                ("N, parameters of matrices and lm_head", "~s", "N", self.by_parameters, []),
            )
        ]

    def sentences(self) -> Iterator[str]:
        """Yield the laws as sentences for people, doubts included."""
        for what, symbol, fit in (
            ("FLOPs", "C", self.by_flops),
            ("scaling parameters", "N", self.by_parameters),
        ):
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

    def tree(self) -> dict[str, Any]:
        """Return the laws as JSON values."""
        return asdict(self)


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
    return [Expected(depth=depth, flops=flops, prediction=found, measured=measured)]


def _certainty(fit: ScalingFit) -> str:
    parts: list[str] = []
    # A range that reaches an end of the search is no range: a doubt reports it instead.
    if fit.exponent_range and not any(doubt.startswith("the exponent") for doubt in fit.doubts):
        known = fit.exponent_range
        parts.append(f"exponent {known.low:.3g} to {known.high:.3g}")
    if fit.law is not None and fit.floor_range and fit.law.floor:
        parts.append(f"floor {fit.floor_range.low:.3g} to {fit.floor_range.high:.3g}")
    if fit.law is not None and fit.law.scatter is not None:
        parts.append(f"scatter {100 * fit.law.scatter:.2g} %")
    return f" ({', '.join(parts)})" if parts else ""
