"""Charts of the report card and of `nanochat compare --html`, as inline SVG.

Colours are CSS variables, so that one drawing serves light, dark and printed pages. The plot area
is fixed, so that the bytes of a chart do not depend on the fonts of the machine.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, TypeAlias

from nanochat_core.errors import ConfigError

Points: TypeAlias = Sequence[tuple[int, float]]  # (step, value), in order of step

WIDTH, HEIGHT = 366, 176
PADDING = {"left": 46, "right": 12, "top": 8, "bottom": 36}
MAX_POINTS = 400
COLOURS = 6  # CSS variables of style.jinja: --c0 to --c5
MOST_FAINT = 3  # with more curves the raw values behind their averages are left out


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number that a training stage logs during training."""

    stage: str
    kind: Literal["step", "eval"]  # kind of the events that have it
    name: str
    title: str
    caption: str


LEARNING = (
    Quantity(
        stage="pretrain",
        kind="step",
        name="loss",
        title="Pretraining loss",
        caption="nats per token",
    ),
    Quantity(
        stage="pretrain",
        kind="eval",
        name="val_bpb",
        title="Pretraining val_bpb",
        caption="bits per byte of held-out text",
    ),
    Quantity(
        stage="midtrain",
        kind="step",
        name="loss",
        title="Midtraining loss",
        caption="nats per token of the assistant",
    ),
    Quantity(
        stage="sft",
        kind="step",
        name="loss",
        title="SFT loss",
        caption="nats per token of the assistant",
    ),
    Quantity(
        stage="rl",
        kind="step",
        name="reward",
        title="RL reward",
        caption="mean over the answers of a step",
    ),
    Quantity(
        stage="rl",
        kind="eval",
        name="pass_at_1",
        title="RL pass@1",
        caption="of held-out questions",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Stop:
    """An interruption of a training job, by a user, an error or a lost machine, and its resume."""

    after: int  # the last step logged before the stop
    back_to: int  # the step of the checkpoint from which it resumed

    def __str__(self) -> str:
        # Steps after the last checkpoint are lost and done again.
        again = self.after - self.back_to
        return f"{self.back_to} (stopped after {self.after})" if again > 0 else str(self.back_to)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One quantity over the steps of one stage."""

    title: str
    caption: str
    points: Points
    stops: Sequence[Stop] = ()
    noisy: bool = True  # raw values faint and their average on top; else a line through dots

    def svg(self) -> str:
        """Return the drawing as SVG, without ids, scripts and fonts of its own."""
        return _draw(_spec(self), f"{self.title}: {self.caption}")


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """One quantity over the steps of a stage, for several runs, each in its own colour."""

    title: str
    caption: str
    curves: Sequence[Points]  # one per run, in order; empty if the run has none
    noisy: bool = True

    def svg(self) -> str:
        """Return the drawing as SVG; see Chart."""
        alt = _altair()
        last = max([step for points in self.curves for step, _ in points], default=1)
        x, y = _axes(alt, last)
        layers: list[Any] = []
        for index, points in enumerate(self.curves):
            color, dash = colour_of(index)
            shown = thin(points)
            if self.noisy and len(self.curves) <= MOST_FAINT:
                layers.append(_line(alt, shown, color, 1).encode(x=x, y=y, opacity=alt.value(0.3)))
            line = alt.Chart(_data(alt, smooth(shown) if self.noisy else shown))
            drawn = line.mark_line(stroke=color, strokeWidth=2, strokeDash=dash)
            layers.append(drawn.encode(x=x, y=y))
        return _draw(_finish(alt, layers), f"{self.title}: {self.caption}")


def colour_of(place: int) -> tuple[str, list[int]]:
    """Return colour and dashes of the run at index `place`: six colours, then the same dashed."""
    return f"var(--c{place % COLOURS})", [6, 3] if place // COLOURS % 2 else [1, 0]


def thin(points: Points, max_points: int = MAX_POINTS) -> list[tuple[int, float]]:
    """Return at most `max_points` points: means of equally long runs of points."""
    # A mean is shown at the last step of its run, so that the curve ends at the last step.
    length = math.ceil(len(points) / max_points) or 1
    runs = [points[first : first + length] for first in range(0, len(points), length)]
    return [(run[-1][0], sum(value for _, value in run) / len(run)) for run in runs]


def smooth(points: Points) -> list[tuple[int, float]]:
    """Return the mean over a window of a thirtieth of the curve around each point."""
    # Centred: an average over the past alone would lag behind a falling loss.
    half = len(points) // 60 + 1
    windows = (points[max(0, i - half) : i + half + 1] for i in range(len(points)))
    means = [sum(value for _, value in window) / len(window) for window in windows]
    return [(step, mean) for (step, _), mean in zip(points, means, strict=True)]


def _spec(chart: Chart) -> dict[str, Any]:
    alt = _altair()
    points = thin(chart.points)
    # A stop may be later than the last point; its mark must still be inside the plot.
    last = max([step for step, _ in points] + [stop.back_to for stop in chart.stops], default=1)
    x, y = _axes(alt, last)
    # Later layers are drawn over earlier ones: marks below the curves.
    layers = [layer.encode(x=x) for layer in _marks(alt, chart.stops)]
    if chart.noisy:
        layers.append(_line(alt, points, "var(--faint)", 1).encode(x=x, y=y))
        layers.append(_line(alt, smooth(points), "var(--accent)", 2).encode(x=x, y=y))
    else:
        layers.append(_line(alt, points, "var(--accent)", 2).encode(x=x, y=y))
        dots = alt.Chart(_data(alt, points)).mark_circle(size=36, fill="var(--accent)", opacity=1)
        layers.append(dots.encode(x=x, y=y))
    return _finish(alt, layers)


def _axes(alt: Any, last: int) -> tuple[Any, Any]:
    x = alt.X(
        "step:Q",
        scale=alt.Scale(domain=[0, last], nice=False),
        axis=alt.Axis(title="step", tickCount=5, grid=False, format="~s"),
    )
    y = alt.Y(
        "value:Q",
        scale=alt.Scale(zero=False, nice=True),
        axis=alt.Axis(title=None, tickCount=5, format="~g", domain=False, ticks=False),
    )
    return x, y


def _finish(alt: Any, layers: Sequence[Any]) -> dict[str, Any]:
    drawing = alt.layer(*layers).properties(
        width=WIDTH,
        height=HEIGHT,
        padding=PADDING,
        # Else Vega sizes the plot by the width of its labels, which depends on installed fonts.
        autosize=alt.AutoSizeParams(type="none"),
        background="transparent",
    )
    return drawing.configure(aria=False, view=_VIEW, axis=_AXIS).to_dict()


def _draw(spec: dict[str, Any], label: str) -> str:
    drawing = _vega_svg(spec)
    # Replace Vega's opening tag, which has a fixed size: with a viewBox alone the page scales it.
    body = drawing[drawing.index(">") + 1 :]
    width = WIDTH + PADDING["left"] + PADDING["right"]
    height = HEIGHT + PADDING["top"] + PADDING["bottom"]
    name = escape(label, quote=True)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{name}">{body}'


# Vega-Lite writes colours into the SVG unchanged, so CSS variables reach the page.
_VIEW = {"stroke": None}
_AXIS = {
    "labelColor": "var(--muted)",
    "titleColor": "var(--muted)",
    "gridColor": "var(--line)",
    "domainColor": "var(--line)",
    "tickColor": "var(--line)",
    "labelFontSize": 12,
    "titleFontSize": 12,
    "titleFontWeight": "normal",
    "labelFont": "inherit",
    "titleFont": "inherit",
}


def _line(alt: Any, points: Points, color: str, width: float) -> Any:
    return alt.Chart(_data(alt, points)).mark_line(stroke=color, strokeWidth=width)


def _marks(alt: Any, stops: Sequence[Stop]) -> Iterator[Any]:
    """Yield a dashed line where the job resumed, and a dotted one where it stopped, if later."""
    if stops:
        yield _rules(alt, sorted({stop.back_to for stop in stops}), [5, 3])
    if lost := sorted({stop.after for stop in stops if stop.after > stop.back_to}):
        yield _rules(alt, lost, [1, 3])


def _rules(alt: Any, steps: Sequence[int], dash: Sequence[int]) -> Any:
    data = alt.Data(values=[{"step": step} for step in steps])
    return alt.Chart(data).mark_rule(stroke="var(--mark)", strokeWidth=1.5, strokeDash=list(dash))


def _data(alt: Any, points: Points) -> Any:
    # Rounded: six decimals are more than a pixel, and keep the page small.
    return alt.Data(values=[{"step": step, "value": round(value, 6)} for step, value in points])


def _altair() -> Any:
    try:
        import altair  # optional: only a machine that draws needs it
    except ImportError as error:
        raise ConfigError(
            "the report card draws with altair, which is not installed",
            hint="pip install 'nanochat-flows[report]'",
        ) from error
    return altair


def _vega_svg(spec: dict[str, Any]) -> str:
    try:
        import vl_convert
    except ImportError as error:
        raise ConfigError(
            "the report card draws with vl-convert-python, which is not installed",
            hint="pip install 'nanochat-flows[report]'",
        ) from error
    return vl_convert.vegalite_to_svg(spec)
