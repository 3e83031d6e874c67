"""Training curves as charts: for the report card, `nanochat compare --html` and Prefect's pages.

A picture for Prefect is an SVG inside a data: address, which needs no host for images. Prefect
stores each twice, with the artifact and in an event.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from flows.render.text import listed
from flows.render.vega import COLOURS, Layer, Panel, channel, layer
from flows.stages import Quantity, curves_of
from nanochat_core.runtime.progress import last_by_step

Points: TypeAlias = Sequence[tuple[int, float]]  # (step, value), in order of step

WIDTH, HEIGHT = 366, 176
PADDING = {"left": 46, "right": 12, "top": 8, "bottom": 36}
MAX_POINTS = 400
NUM_COLOURS = 6  # of the palette: c0 to c5
FEW = 3  # points that are drawn as dots, without a line
MAX_FAINT = 3  # with more curves the raw values behind their averages are left out


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
    """One quantity over the steps of a stage: of one run, or of several in colours of their own."""

    quantity: Quantity
    curves: Sequence[Points]  # one per run, in order; empty if the run has none
    stops: Sequence[Stop] = ()

    @property
    def is_short(self) -> bool:
        """Return whether it is of measurements, and of so few that they make no line."""
        longest = max(map(len, self.curves), default=0)
        return self.quantity.kind == "eval" and 0 < longest <= FEW

    @property
    def panel(self) -> Panel:
        """The chart with its title."""
        return Panel(
            title=self.quantity.title,
            caption=self.quantity.caption,
            layers=list(self._layers()),
            width=WIDTH,
            height=HEIGHT,
            padding=PADDING,
            stops=listed(self.stops),
        )

    def _layers(self) -> Iterator[Layer]:
        steps = [step for points in self.curves for step, _ in points]
        # A stop may be later than the last point; its mark must still be inside the plot.
        last = max(steps + [stop.back_to for stop in self.stops], default=1)
        axis: Any = {"title": "step", "tickCount": 5, "grid": False, "format": "~s"}
        x = channel("step", scale={"domain": [0, last], "nice": False}, **axis)
        axis = {"title": None, "tickCount": 5, "format": "~g", "domain": False, "ticks": False}
        # From 0 if the value never changes: an axis without a range has one tick, rounded.
        is_constant = len({value for points in self.curves for _, value in points}) == 1
        y = channel("value", scale={"zero": is_constant, "nice": True}, **axis)
        yield from _marks(self.stops, COLOURS["mark"], x)
        for index, points in enumerate(self.curves):
            style = {**line_style(index), "strokeWidth": 2}
            shown = thin(points)
            if self.quantity.kind == "eval":
                if len(shown) > FEW:
                    yield layer(_values(shown), "line", style, x=x, y=y)
                if len(self.curves) == 1 or len(shown) <= FEW:
                    dot = {"size": 36, "fill": style["stroke"], "opacity": 1}
                    yield layer(_values(shown), "circle", dot, x=x, y=y)
                continue
            # The first steps fall so steeply that they would flatten the rest of the curve.
            shown = shown[len(shown) // 20 :]
            # Each step is noisy: the raw values faint, and their average on top.
            if len(self.curves) <= MAX_FAINT:
                faint = {"stroke": style["stroke"], "strokeWidth": 1, "opacity": 0.3}
                yield layer(_values(shown), "line", faint, x=x, y=y)
            yield layer(_values(smooth(shown)), "line", style, x=x, y=y)


def line_style(index: int) -> dict[str, Any]:
    """Return colour and dashes of the run at `index`: six colours, then the same ones dashed."""
    dash = [6, 3] if index // NUM_COLOURS % 2 else [1, 0]
    return {"stroke": COLOURS[f"c{index % NUM_COLOURS}"], "strokeDash": dash}


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


def _marks(stops: Sequence[Stop], colour: str, x: dict[str, Any]) -> Iterator[Layer]:
    """Yield a dashed line where the job resumed, and a dotted one where it stopped, if later."""
    resumed = {stop.back_to for stop in stops}
    lost = {stop.after for stop in stops if stop.after > stop.back_to}
    for steps, dash in ((resumed, [5, 3]), (lost, [1, 3])):
        if steps:
            style = {"stroke": colour, "strokeWidth": 1.5, "strokeDash": dash}
            yield layer(({"step": step} for step in sorted(steps)), "rule", style, x=x)


def _values(points: Points) -> list[dict[str, float]]:
    # Rounded: six decimals are more than a pixel, and keep the page small.
    return [{"step": step, "value": round(value, 6)} for step, value in points]


def charts_of(
    stage: str, events: Sequence[dict[str, Any]], stops: Sequence[Stop] = ()
) -> list[Chart]:
    """Return a chart for each quantity of a stage, with the points that its events have.

    Of a step that was repeated after a stop the last value counts.
    """
    return [
        Chart(quantity=q, curves=[points_of(events, q.kind, q.name)], stops=stops)
        for q in curves_of(stage)
    ]


def points_of(events: Sequence[dict[str, Any]], kind: str, name: str) -> list[tuple[int, float]]:
    """Return step and value of `name` in events of `kind` ("step" or "eval"), by step."""
    by_step = last_by_step(iter(events), kind).items()
    found = ((step, values.get(name)) for step, values in by_step)
    # A diverged step logs NaN, which JSON and so Vega-Lite do not have; another program's events
    # may have text, null or a flag.
    return [
        (step, value)
        for step, value in found
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ]
