"""Progress of stages while they are built: at the end of a terminal, and as lines elsewhere.

`Display.watch` takes the events that `flows.building.build` emits. Stages may be built at the same
time, each in its own thread.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from rich.console import Console, Group
from rich.status import Status
from rich.text import Text

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
    """A display of events on `console`. Use as a context manager.

    Below the lines a terminal has a line for each loop that is executed, and for the run.
    """

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
        self._offer = offer
        # Reentrant: a signal handler runs in the main thread, which may hold the lock, and prints.
        self._lock = threading.RLock()
        self._loops: dict[str, Loop] = {}
        self._printed: dict[str, float] = {}  # time of the last line of a loop
        self._console = console
        self._status = Status("", console=console) if console.is_terminal else None
        self._on_leave = on_leave

    def __enter__(self) -> Self:
        if self._status is not None:
            self._show_progress()  # from the first second on, while Prefect starts
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the progress and show the cursor again. May be called twice."""
        if self._status is not None:
            self._status.stop()

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
            text = self._line_of_step(stage) if kind == "step" else describe(event)
            if text is not None:
                self._say(stage, text, _STYLES.get(kind))
            if kind == "failed" and event["log_tail"]:
                self.say(event["log_tail"], "dim")
            if kind in ("cached", "finished", "failed", "interrupted"):
                self._loops.pop(stage, None)
                self._expected.pop(stage, None)
                if text := self._offer(stage, event):
                    self._say(stage, text, "bold")
            self._show_progress()

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line that is not of a stage. Control characters are escaped: jobs write text."""
        text = escaped(text)
        with self._lock:
            self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _say(self, stage: str, text: str, style: str | None) -> None:
        # A newline in a worker's text could fake a line of another stage.
        self.say(self._line(stage, text.replace("\n", " ")), style)

    def _line(self, stage: str, text: str) -> str:
        return f"{stage:<{self._width}}  {text}"

    def _line_of_step(self, stage: str) -> str | None:
        """Return a progress line at most every 5 s; None if not due, or on a terminal."""
        now = time.monotonic()
        if self._status is not None or stage not in self._loops:
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
        left = [self._seconds_left(stage) for stage in self._expected]
        known = [seconds for seconds in left if seconds is not None]
        if not known:
            return "time left not known"
        return f"{'about' if len(known) == len(left) else 'at least'} {duration(sum(known))} left"

    def _seconds_left(self, stage: str) -> float | None:
        loop = self._loops.get(stage)
        if loop is not None and loop.seconds_left is not None:
            return loop.seconds_left
        expected = self._expected[stage]
        if expected is None or stage not in self._began:
            return expected
        left = expected - (time.monotonic() - self._began[stage])
        return left if left > 0 else None

    def _show_progress(self) -> None:
        if self._status is not None:
            lines = [self._line(stage, loop.line) for stage, loop in self._loops.items()]
            lines += [self._line("run", self.left)] if self.left else []
            shown = (Text(escaped(line), no_wrap=True, overflow="ellipsis") for line in lines)
            self._status.update(Group(*shown))
