"""The progress events of a running job: one JSON object per line in events.jsonl.

Kinds of event, each with `time` (unix seconds):

    start    {"step", "total", "unit", "resumed"}   a loop begins or resumes at `step`
    step     {"step", "total", "values"}            one unit of work done; `values` are numbers
    eval     {"step", "values"}                     scores measured at `step`
    stopping {"step"}                               asked to stop, the loop saves `step` and ends
    message  {"text"}                               a log line for people

A resumed job appends. Its steps after the checkpoint are written again, with the same values, so a
reader uses the last event of each (kind, step).
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanochat_core.runtime.heartbeat import HEARTBEAT
from nanochat_core.runtime.interrupt import STOP

_FIELDS: dict[str, dict[str, type]] = {
    "start": {"step": int, "total": int, "unit": str, "resumed": bool},
    "step": {"step": int, "total": int, "values": dict},
    "eval": {"step": int, "values": dict},
    "stopping": {"step": int},
    "message": {"text": str},
}


class Progress:
    """The event log at `path`. On ranks other than 0 (`active=False`) it writes nothing."""

    def __init__(self, path: Path, *, active: bool = True) -> None:
        self._path = path if active else None
        # A killed job may have left an incomplete line: end it, so that ours starts a new one.
        if active and path.exists() and not _ends_whole(path):
            with path.open("a", encoding="utf-8") as file:
                file.write("\n")
        self._total = 0

    def start(self, total: int, *, unit: str = "step", step: int = 0) -> None:
        """Log that a loop of `total` units begins at `step` (greater than 0 when resumed)."""
        self._total = total
        HEARTBEAT.started()
        self._write("start", step=step, total=total, unit=unit, resumed=step > 0)

    def step(self, step: int, **values: float) -> None:
        """Log that `step` units are done."""
        HEARTBEAT.beat(f"after {step} of {self._total}")
        self._write("step", step=step, total=self._total, values=values)
        STOP.after_step()

    def eval(self, step: int, **values: float) -> None:
        """Log scores of the state after `step` units."""
        self._write("eval", step=step, values=values)

    def stopping(self, step: int) -> None:
        """Log that the job saves the state after `step` units and ends, as it was asked to."""
        self._write("stopping", step=step)

    def message(self, text: str) -> None:
        """Log a line for people."""
        self._write("message", text=text)

    def _write(self, kind: str, **fields: Any) -> None:
        if self._path is None:
            return
        event = {"time": round(time.time(), 3), "kind": kind, **fields}
        with self._path.open("a", encoding="utf-8") as file:  # opening costs some 20 microseconds
            file.write(json.dumps(event) + "\n")


def _ends_whole(path: Path) -> bool:
    data = path.read_bytes()
    return not data or data.endswith(b"\n")


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Return all complete events of a file. A killed job's incomplete line is skipped.

    So is a line that no job writes: the file may come from the store.
    """
    return filter(_is_event, read_groups(path))


def read_groups(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file that are JSON objects."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                yield found


def _is_event(event: dict[str, Any]) -> bool:
    kind = event.get("kind")
    if not isinstance(kind, str):
        return False
    needed = _FIELDS.get(kind, {})
    return all(type(event.get(name)) is expected for name, expected in needed.items())


def last_by_step(events: Iterator[dict[str, Any]], kind: str) -> dict[int, dict[str, float]]:
    """Return step -> values of the last event of `kind` at that step, in order of step."""
    found = {e["step"]: e["values"] for e in events if e["kind"] == kind}
    return dict(sorted(found.items()))
