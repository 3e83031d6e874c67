"""Progress of stages while they are built: bars on a terminal, plain lines elsewhere.

`Display.watch` takes the events that `flows.build.build` emits. Stages may be built at the same
time, each in its own thread.
"""

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

SECONDS_BETWEEN_LINES = 5.0
_SHOWN_VALUES = 4
_STYLES = {
    "cached": "dim",
    "finished": "green",
    "warning": "yellow",
    "failed": "red",
    "interrupted": "yellow",
}


def describe(event: Mapping[str, Any]) -> str | None:
    """Return one plain line for an event, or None for events that only move a bar."""
    match event["kind"]:
        case "cached":
            return "cached"
        case "building":
            several = event["processes"] > 1
            return f"started, {event['processes']} processes" if several else "started"
        case "start" if event["resumed"]:
            return f"resumed at {event['unit']} {event['step']}/{event['total']}"
        case "eval":
            return f"step {event['step']}: {describe_values(event['values'])}"
        case "finished":
            text = f"finished in {duration(event['seconds'])}"
            values = describe_values(event["metrics"])
            return f"{text}  {values}" if values else text
        case "interrupted":
            return "interrupted; the same command resumes from here"
        case "failed":
            return f"failed: {event['error']}"
        case "warning":
            return f"warning: {event['text']}"
        case "message" | "waiting":
            return event["text"]
        case _:
            return None


def describe_values(values: Mapping[str, Any]) -> str:
    """Return the first 4 numbers of a group, as `name value` or `name value (low to high)`."""
    # Not isinstance: a bool is an int.
    numbers = {name: value for name, value in values.items() if type(value) in (int, float)}
    shown: list[str] = []
    for name, value in numbers.items():
        whole, _, end = name.rpartition("_")
        # core_low and core_high are printed with core, as its interval.
        if end in ("low", "high") and whole in numbers:
            continue
        low, high = (numbers.get(f"{name}_{end}") for end in ("low", "high"))
        between = "" if low is None or high is None else f" ({number(low)} to {number(high)})"
        shown.append(f"{name} {number(value)}{between}")
    return "  ".join(shown[:_SHOWN_VALUES])


def number(value: float) -> str:
    """Return four digits, or all digits of an integer or a number of 1000 and more."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return seconds as text: 4.2 s, 83 s, 12 min, 3.4 h, 2.5 days."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


@dataclass
class _Loop:
    """The running loop of a stage, for its ETA. Times are of time.monotonic, in seconds."""

    first: int  # step at which this execution began
    began: float
    shown: float  # time of the last printed line
    unit: str = "step"

    def eta(self, step: int, total: int, now: float) -> float | None:
        """Return the seconds left, or None before the first step is done."""
        # Steps of this execution only: those before a resume ran at another time.
        done = step - self.first
        return (total - step) * (now - self.began) / done if done > 0 else None


class Display:
    """A display of events on `console`, with bars on a terminal. Use as a context manager."""

    def __init__(self, console: Console, *, stages: Iterable[str]) -> None:
        self._width = max(map(len, stages), default=0)
        # Reentrant: a signal handler runs in the main thread, which may hold the lock, and prints.
        self._lock = threading.RLock()
        self._loops: dict[str, _Loop] = {}
        self._bars: dict[str, TaskID] = {}
        self._console = console
        self._progress = _make_bars(console) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bars and show the cursor again. May be called twice."""
        if self._progress is not None:
            self._progress.stop()

    def watch(self, stage: str, event: Mapping[str, Any]) -> None:
        """Show one event of a stage."""
        with self._lock:
            kind = event["kind"]
            if kind == "start":
                now = time.monotonic()
                self._loops[stage] = _Loop(event["step"], now, now, event["unit"])
            if kind in ("building", "start", "step"):
                self._move(stage, event)
            text = self._line_of_step(stage, event) if kind == "step" else describe(event)
            if text is not None:
                self._say(stage, text, _STYLES.get(kind))
            if kind == "failed" and event["log_tail"]:
                self._console.print(event["log_tail"], style="dim", markup=False, highlight=False)
            if kind in ("finished", "failed", "interrupted"):
                self._end(stage)

    def say(self, text: str) -> None:
        """Print a line that is not of a stage."""
        with self._lock:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _say(self, stage: str, text: str, style: str | None) -> None:
        # A newline in a worker's text could fake a line of another stage.
        one_line = text.replace("\n", " ")
        line = f"{stage:<{self._width}}  {one_line}"
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def _line_of_step(self, stage: str, event: Mapping[str, Any]) -> str | None:
        """Return a progress line at most every 5 s; None if not due, or if there are bars."""
        loop = self._loops.get(stage)
        now = time.monotonic()
        if self._progress is not None or loop is None or now - loop.shown < SECONDS_BETWEEN_LINES:
            return None
        loop.shown = now
        parts = [f"{loop.unit} {event['step']}/{event['total']}", describe_values(event["values"])]
        left = loop.eta(event["step"], event["total"], now)
        if left is not None:
            parts.append(f"{duration(left)} left")
        return "  ".join(filter(None, parts))

    def _move(self, stage: str, event: Mapping[str, Any]) -> None:
        if self._progress is None:
            return
        if stage not in self._bars:
            name = f"{stage:<{self._width}}"
            self._bars[stage] = self._progress.add_task(name, total=None, values="", left="")
        if event["kind"] == "building":  # the worker has not said yet how many steps there are
            return
        loop = self._loops[stage]
        left = loop.eta(event["step"], event["total"], time.monotonic())
        self._progress.update(
            self._bars[stage],
            completed=event["step"],
            total=event["total"],
            values=describe_values(event.get("values", {})),
            left=f"{duration(left)} left" if left is not None else "",
        )

    def _end(self, stage: str) -> None:
        self._loops.pop(stage, None)
        bar = self._bars.pop(stage, None)
        if self._progress is not None and bar is not None:
            self._progress.remove_task(bar)


class _StepColumn(ProgressColumn):
    """`step/total`, empty before a loop begins."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        return Text(f"{task.completed:.0f}/{task.total:.0f}")


def _make_bars(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        _StepColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        TextColumn("{task.fields[values]}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,  # the printed lines stay; a finished bar would only repeat them
        refresh_per_second=4,
    )
