"""Progress of stages while they are built: bars on a terminal, plain lines elsewhere.

`Display.watch` takes the events that `flows.building.build` emits. Stages may be built at the same
time, each in its own thread.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from flows.render.events import Loop, describe
from flows.render.text import duration, escaped

SECONDS_BETWEEN_LINES = 5.0
_STYLES = {
    "cached": "dim",
    "warning": "yellow",
    "failed": "red",
    "interrupted": "yellow",
}


class Display:
    """A display of events on `console`, with bars on a terminal. Use as a context manager."""

    def __init__(
        self,
        console: Console,
        *,
        stages: Iterable[str],
        # Seconds of each stage that will be built; None is not known.
        expected: Mapping[str, float | None] | None = None,
        offer: Callable[[str, Mapping[str, Any]], str | None] = lambda stage, event: None,
        on_leave: Callable[[], None] = lambda: None,  # see `leave`
    ) -> None:
        """Show `stages`; `offer` returns what may be said after the last event of a stage.

        With `expected`, the time that is left of the whole run is shown too.
        """
        self._width = max(map(len, stages), default=0)
        self._shows_run = bool(expected)
        self._expected = dict(expected or {})  # of stages that have not ended
        self._began: dict[str, float] = {}  # when each stage that is being built was started
        self._started = time.monotonic()
        self._offer = offer
        # Reentrant: a signal handler runs in the main thread, which may hold the lock, and prints.
        self._lock = threading.RLock()
        self._loops: dict[str, Loop] = {}
        self._printed: dict[str, float] = {}  # time of the last line of a loop
        self._bars: dict[str, TaskID] = {}
        self._run_bar: TaskID | None = None
        self._console = console
        self._progress = _make_bars(console) if console.is_terminal else None
        self._on_leave = on_leave

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
            if self._expected:  # from the first second on, while Prefect starts
                self._run_bar = self._progress.add_task(f"{'run':<{self._width}}", line=self.left)
                self._move_run_bar()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bars and show the cursor again. May be called twice."""
        if self._progress is not None:
            self._progress.stop()

    def leave(self) -> None:
        """Close the display for a process that exits at once, whose handlers will not run."""
        self.close()
        self._on_leave()

    def watch(self, stage: str, event: Mapping[str, Any]) -> None:
        """Show one event of a stage."""
        with self._lock:
            kind = event["kind"]
            if kind == "building":
                self._began[stage] = time.monotonic()
                self._expected.setdefault(stage, None)  # it was not going to be built
            if kind == "start":
                self._loops[stage] = Loop.of(event)
                self._printed[stage] = time.monotonic()
            elif kind == "step" and stage in self._loops:
                self._loops[stage].move(event)
            if kind in ("building", "start", "step"):
                self._move_bar(stage)
            text = self._line_of_step(stage) if kind == "step" else describe(event)
            if text is not None:
                self._say(stage, text, _STYLES.get(kind))
            if kind == "failed" and event["log_tail"]:
                self.say(event["log_tail"], "dim")
            if kind in ("cached", "finished", "failed", "interrupted"):
                self._end(stage)
                if text := self._offer(stage, event):
                    self._say(stage, text, "bold")
            self._move_run_bar()

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line that is not of a stage. Control characters are escaped: jobs write text."""
        text = escaped(text)
        with self._lock:
            self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _say(self, stage: str, text: str, style: str | None) -> None:
        # A newline in a worker's text could fake a line of another stage.
        one_line = text.replace("\n", " ")
        self.say(f"{stage:<{self._width}}  {one_line}", style)

    def _line_of_step(self, stage: str) -> str | None:
        """Return a progress line at most every 5 s; None if not due, or if there are bars."""
        now = time.monotonic()
        if self._progress is not None or stage not in self._loops:
            return None
        if now - self._printed[stage] < SECONDS_BETWEEN_LINES:
            return None
        self._printed[stage] = now
        return "; ".join(filter(None, (self._loops[stage].line, self.left and f"run {self.left}")))

    @property
    def left(self) -> str:
        """The estimated time left of the whole run as text; "" without estimates.

        Stages count one after the other, though some are built at the same time. A stage of which
        no time is known, or that takes longer than expected, makes the sum "at least".
        """
        if not (self._shows_run and self._expected):
            return ""
        known, unknown = self._sum_left()
        if unknown == len(self._expected):
            return "time left not known"
        return f"{'at least' if unknown else 'about'} {duration(known)} left"

    def _sum_left(self) -> tuple[float, int]:
        """Return the known seconds left, and the number of stages of which they are not known."""
        left = [self._seconds_left(stage) for stage in self._expected]
        known = [seconds for seconds in left if seconds is not None]
        return sum(known), len(left) - len(known)

    def _seconds_left(self, stage: str) -> float | None:
        loop = self._loops.get(stage)
        if loop is not None and loop.seconds_left is not None:
            return loop.seconds_left
        expected = self._expected[stage]
        if expected is None or stage not in self._began:
            return expected
        left = expected - (time.monotonic() - self._began[stage])
        return left if left > 0 else None

    def _move_run_bar(self) -> None:
        if self._progress is not None and self._run_bar is not None:
            known, unknown = self._sum_left()
            spent = time.monotonic() - self._started
            for task in self._progress.tasks:
                if task.id == self._run_bar:  # `update` would keep the total that was known before
                    task.total = None if unknown else spent + known
            self._progress.update(self._run_bar, completed=spent, line=self.left)

    def _move_bar(self, stage: str) -> None:
        if self._progress is None:
            return
        if stage not in self._bars:
            name = f"{stage:<{self._width}}"
            self._bars[stage] = self._progress.add_task(name, total=None, line="")
        # Before the loop begins the number of steps is not known.
        if loop := self._loops.get(stage):
            self._progress.update(
                self._bars[stage], completed=loop.step, total=loop.total, line=escaped(loop.line)
            )

    def _end(self, stage: str) -> None:
        self._loops.pop(stage, None)
        self._expected.pop(stage, None)
        bar = self._bars.pop(stage, None)
        if self._progress is not None and bar is not None:
            self._progress.remove_task(bar)


def _make_bars(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[line]}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,  # the printed lines stay; a finished bar would only repeat them
        refresh_per_second=4,
    )
