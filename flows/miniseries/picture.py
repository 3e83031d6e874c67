"""The plot of a series: bits per byte against the cost of a model, with the fitted law.

A drawing is a Vega-Lite specification. In a page its colours are CSS variables of the page, so one
drawing serves light and dark screens and paper; a PNG has the light colours.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from flows.miniseries.findings import Findings, formula
from flows.miniseries.points import PointScore
from flows.miniseries.scaling_law import Prediction, ScalingFit
from nanochat_core.errors import ConfigError

PNG_SCALE = 2.0
_CURVE_POINTS = 101
_MARGIN = 0.12  # share of the data's range that an axis extends beyond it at either end
_VARIABLES = ("card", "ink", "muted", "line", "accent", "faint", "mark")
_IN_PAGE = {name: f"var(--{name})" for name in _VARIABLES}
_LIGHT = {
    **{"card": "#ffffff", "ink": "#1d2125", "muted": "#667078", "line": "#e4e2dc"},
    **{"accent": "#17697f", "faint": "#b5d3da", "mark": "#c2691a"},
}


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A trained model in the plot."""

    label: str
    x: float
    score: PointScore


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """A predicted model in the plot, which was not trained."""

    label: str
    x: float
    prediction: Prediction


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A plot of bits per byte against one measure of a model."""

    title: str
    caption: str
    axis: str
    form: str  # d3's format of the numbers on the axis
    dots: Sequence[Dot]
    fit: ScalingFit
    ahead: Ahead | None

    def svg(self, *, width: int = 460, height: int = 260) -> str:
        """Return the plot as SVG for a page."""
        # The root element is replaced: the converter's has a fixed size, this one scales.
        drawing = _converter().vegalite_to_svg(_spec(self, _IN_PAGE, width, height))
        body = drawing[drawing.index(">") + 1 :]
        box = f"0 0 {width + _LEFT + _RIGHT} {height + _TOP + _BOTTOM}"
        name = escape(f"{self.title}: {self.caption}", quote=True)
        return f'<svg viewBox="{box}" role="img" aria-label="{name}">{body}'

    def png(self, *, width: int = 680, height: int = 380) -> bytes:
        """Return the plot as PNG, with its title."""
        spec = _spec(self, _LIGHT, width, height, title=True)
        return _converter().vegalite_to_png(spec, scale=PNG_SCALE)


def check_drawing() -> None:
    """Raise ConfigError if this machine cannot draw, before hours are spent on training."""
    _converter()


def pictures(findings: Findings) -> tuple[Picture, Picture]:
    """Return the plots by FLOPs and by parameters."""
    after = findings.next
    by_flops = Picture(
        title=f"Miniseries {findings.name}",
        caption=f"bits per byte of held-out text{_line(findings.by_flops, 'C')}",
        axis="C, FLOPs of training",
        form="~e",
        dots=[Dot(label=f"d{p.depth}", x=p.size.flops, score=p.val_bpb) for p in findings.points],
        fit=findings.by_flops,
        ahead=after
        and Ahead(label=f"d{after.depth}?", x=after.size.flops, prediction=after.prediction),
    )
    by_parameters = Picture(
        title=f"Miniseries {findings.name}",
        caption=f"bits per byte of held-out text{_line(findings.by_parameters, 'N')}",
        axis="N, parameters of matrices and lm_head",
        form="~s",
        dots=[
            Dot(label=f"d{p.depth}", x=float(p.size.scaling_parameters), score=p.val_bpb)
            for p in findings.points
        ],
        fit=findings.by_parameters,
        ahead=None,
    )
    return by_flops, by_parameters


def _line(fit: ScalingFit, symbol: str) -> str:
    return f"; the line is {formula(fit.law, symbol)}" if fit.law else ""


_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 22, 12, 44
_TITLE_HEIGHT = 52


def _spec(
    picture: Picture, colours: Mapping[str, str], width: int, height: int, *, title: bool = False
) -> dict[str, Any]:
    x = _x_range(picture)
    y = _y_range(picture)
    top = _TOP + (_TITLE_HEIGHT if title else 0)
    spec: dict[str, Any] = {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "width": width,
        "height": height,
        "padding": {"left": _LEFT, "right": _RIGHT, "top": top, "bottom": _BOTTOM},
        # Fixed padding instead of fitting the labels, so that svg() knows the size of the viewBox.
        "autosize": {"type": "none"},
        "background": colours["card"] if title else "transparent",
        "layer": list(_layers(picture, colours, x, y)),
        "config": {
            # The page's <svg> has one label; Vega would add one for every mark.
            "aria": False,
            "font": "sans-serif" if title else "inherit",
            "view": {"stroke": None},
            "axis": _axis(colours),
        },
    }
    if title:
        spec["title"] = {
            "text": picture.title,
            "subtitle": picture.caption,
            "anchor": "start",
            "offset": 18,
            "color": colours["ink"],
            "subtitleColor": colours["muted"],
            "fontSize": 17,
            "subtitleFontSize": 13,
            "subtitlePadding": 5,
        }
    return spec


def _layers(
    picture: Picture,
    colours: Mapping[str, str],
    x_range: tuple[float, float],
    y_range: tuple[float, float],
) -> Iterator[dict[str, Any]]:
    x = {
        "field": "x",
        "type": "quantitative",
        "scale": {"type": "log", "domain": list(x_range), "nice": False},
        "axis": {
            "title": picture.axis,
            "values": _ticks(*x_range),
            "format": picture.form,
            # 1e20 instead of d3's 1e+20.
            "labelExpr": "replace(datum.label, 'e+', 'e')",
            "grid": False,
        },
    }
    y = {
        "field": "y",
        "type": "quantitative",
        # Without zero: losses differ by a few per cent, and would be one flat line.
        "scale": {"zero": False, "domain": list(y_range), "nice": False},
        "axis": {"title": None, "tickCount": 6, "format": "~g", "domain": False, "ticks": False},
    }
    span = {**{"x": x, "y": {**y, "field": "low"}}, "y2": {"field": "high"}}
    if picture.fit.law is not None:
        measured = [dot.x for dot in picture.dots]
        # Solid among the measured points, dashed beyond them.
        for low, high, dash in (
            (min(measured), max(measured), [1, 0]),
            (max(measured), x_range[1], [4, 4]),
        ):
            yield {
                "data": {"values": _curve(picture.fit, low, high, y_range)},
                "mark": {
                    "type": "line",
                    "stroke": colours["accent"],
                    "strokeWidth": 2,
                    "strokeDash": dash,
                },
                "encoding": {"x": x, "y": y},
            }
    bars = [
        {"x": dot.x, "low": dot.score.low, "high": dot.score.high}
        for dot in picture.dots
        if dot.score.low is not None
    ]
    yield {
        "data": {"values": bars},
        "mark": {**_line_of(colours["ink"], 1.5, [1, 0]), "type": "rule"},
        "encoding": span,
    }
    if picture.ahead is not None:
        yield from _ahead(picture.ahead, colours, x, y, span, y_range)
    dots: list[dict[str, Any]] = [
        {"x": dot.x, "y": dot.score.value, "label": dot.label} for dot in picture.dots
    ]
    yield {
        "data": {"values": dots},
        "mark": {"type": "circle", "size": 70, "fill": colours["ink"], "opacity": 1},
        "encoding": {"x": x, "y": y},
    }
    law = picture.fit.law
    # Labels of points below the falling line go below it: above they would be on the line.
    below = [dot for dot in dots if law is not None and dot["y"] < law.at(dot["x"])]
    above = [dot for dot in dots if dot not in below]
    yield _labels(above, colours["ink"], x, y)
    yield _labels(below, colours["ink"], x, y, is_below=True)


def _ahead(
    ahead: Ahead,
    colours: Mapping[str, str],
    x: Mapping[str, Any],
    y: Mapping[str, Any],
    span: Mapping[str, Any],
    y_range: tuple[float, float],
) -> Iterator[dict[str, Any]]:
    known = ahead.prediction.range
    if known is not None:
        # Cut at the axis: Vega-Lite would draw the rule beyond the plot.
        ends = [min(max(end, y_range[0]), y_range[1]) for end in (known.low, known.high)]
        yield {
            "data": {"values": [{"x": ahead.x, "low": ends[0], "high": ends[1]}]},
            "mark": {
                "type": "rule",
                "stroke": colours["mark"],
                "strokeWidth": 1.5,
                "strokeDash": [2, 3],
            },
            "encoding": span,
        }
    place = [{"x": ahead.x, "y": ahead.prediction.value, "label": ahead.label}]
    yield {
        "data": {"values": place},
        "mark": {
            "type": "point",
            "size": 70,
            "stroke": colours["mark"],
            "fill": colours["card"],
            "strokeWidth": 2,
            "opacity": 1,
        },
        "encoding": {"x": x, "y": y},
    }
    yield _labels(place, colours["mark"], x, y)


def _labels(
    places: Sequence[Mapping[str, Any]],
    colour: str,
    x: Mapping[str, Any],
    y: Mapping[str, Any],
    *,
    is_below: bool = False,
) -> dict[str, Any]:
    return {
        "data": {"values": list(places)},
        "mark": {
            "type": "text",
            "fill": colour,
            "dx": -9 if is_below else 9,
            "dy": 14 if is_below else -9,
            "align": "right" if is_below else "left",
            "fontSize": 13,
        },
        "encoding": {"x": x, "y": y, "text": {"field": "label", "type": "nominal"}},
    }


def _line_of(colour: str, width: float, dash: Sequence[int]) -> dict[str, Any]:
    return {"stroke": colour, "strokeWidth": width, "strokeDash": list(dash)}


def _curve(
    fit: ScalingFit, low: float, high: float, y_range: tuple[float, float]
) -> list[dict[str, float]]:
    assert fit.law is not None
    shares = [i / (_CURVE_POINTS - 1) for i in range(_CURVE_POINTS)]
    places = [low * (high / low) ** share for share in shares]  # even steps on a log axis
    found = [{"x": x, "y": round(fit.law.at(x), 6)} for x in places]
    return [place for place in found if y_range[0] <= place["y"] <= y_range[1]]


def _x_range(picture: Picture) -> tuple[float, float]:
    known = [dot.x for dot in picture.dots] + ([picture.ahead.x] if picture.ahead else [])
    low, high = min(known, default=1.0), max(known, default=10.0)
    beyond = (high / low) ** _MARGIN if high > low else 2.0
    return low / beyond, high * beyond


def _y_range(picture: Picture) -> tuple[float, float]:
    """Return the range of the y axis: all measured and predicted values, and a margin."""
    # Without the predicted range, which may be so wide that the points would be a flat line.
    known = [
        end
        for dot in picture.dots
        for end in (dot.score.value, dot.score.low, dot.score.high)
        if end is not None
    ]
    if picture.ahead is not None:
        known.append(picture.ahead.prediction.value)
    low, high = min(known, default=0.0), max(known, default=1.0)
    beyond = (high - low) * _MARGIN or 0.1
    return low - beyond, high + beyond


def _ticks(low: float, high: float) -> list[float]:
    """Return powers of ten in the range; with fewer than three, also multiples between them."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
        found = [step * 10.0**decade for decade in decades for step in steps]
        found = [tick for tick in found if low <= tick <= high]
        if len(found) >= 3:
            break
    return found


def _axis(colours: Mapping[str, str]) -> dict[str, Any]:
    named = {f"{part}Color": colours["muted"] for part in ("label", "title")}
    lines = {f"{part}Color": colours["line"] for part in ("grid", "domain", "tick")}
    return {
        **{**named, **lines, "labelFontSize": 12, "titleFontSize": 12},
        **{"titleFontWeight": "normal", "titlePadding": 10},
    }


def _converter() -> Any:
    try:
        import vl_convert  # an optional dependency that only drawing needs
    except ImportError as error:
        raise ConfigError(
            "a miniseries is drawn with vl-convert-python, which is not installed",
            hint="pip install 'nanochat-flows[report]'",
        ) from error
    return vl_convert
