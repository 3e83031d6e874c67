"""What a person sees while stages are built: progress bars on a terminal, plain lines elsewhere.

`Display.watch` takes the events that `flows.build.build` tells. Stages may be built at the same
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
    """One plain line for an event, or None for those that only move a bar."""
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
            return "interrupted; the same command goes on from here"
        case "failed":
            return f"failed: {event['error']}"
        case "warning":
            return f"warning: {event['text']}"
        case "message" | "waiting":
            return event["text"]
        case _:
            return None


def describe_values(values: Mapping[str, Any]) -> str:
    """The first few numbers of a group, as `name value`, or `name value (low to high)`."""
    numbers = {name: value for name, value in values.items() if type(value) in (int, float)}
    shown: list[str] = []
    for name, value in numbers.items():
        whole, _, end = name.rpartition("_")
        if end in ("low", "high") and whole in numbers:
            continue
        low, high = (numbers.get(f"{name}_{end}") for end in ("low", "high"))
        between = "" if low is None or high is None else f" ({number(low)} to {number(high)})"
        shown.append(f"{name} {number(value)}{between}")
    return "  ".join(shown[:_SHOWN_VALUES])


def number(value: float) -> str:
    """Four digits, or all of them when it is a count."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """Seconds as a person says them: 4.2 s, 83 s, 12 min, 3.4 h, 2.5 days."""
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
    """The loop that a stage is in."""

    first: int  # step at which this execution began
    began: float
    shown: float  # when its last line was printed
    unit: str = "step"

    def eta(self, step: int, total: int, now: float) -> float | None:
        """Seconds left, or None before anything is known."""
        done = step - self.first
        return (total - step) * (now - self.began) / done if done > 0 else None


class Display:
    """Shows events on `console`; with bars when it is a terminal. Use as a context manager."""

    def __init__(self, console: Console, *, stages: Iterable[str]) -> None:
        self._width = max(map(len, stages), default=0)
        self._lock = threading.RLock()  # a signal handler may speak in the middle of a line
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
        """Take the bars away and give the cursor back. May be called twice."""
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
        """Print a line that belongs to no stage."""
        with self._lock:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _say(self, stage: str, text: str, style: str | None) -> None:
        one_line = text.replace("\n", " ")  # else a worker's text passes for another stage's line
        line = f"{stage:<{self._width}}  {one_line}"
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def _line_of_step(self, stage: str, event: Mapping[str, Any]) -> str | None:
        """A line every few seconds, where there is no bar."""
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
        if event["kind"] == "building":
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
        transient=True,
        refresh_per_second=4,
    )
