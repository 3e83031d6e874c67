"""What a schedule has found: `results.json`, `table.txt` and `log.txt` in one folder.

The first two are written again after every result and every change of a step, each in one piece: a
session that dies at any second leaves all that was found.
"""

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from bench.gpu.schedule import Step

NEEDS_GPU = "needs a GPU"
LAST_LINES = 15  # of a failed step's errors
LOG_BYTES = 12_000_000  # what returns from a rented machine may be no larger than 16 MiB
Status: TypeAlias = Literal[
    "waiting", "preparing", "ready", "running", "ok", "failed", "skipped", "needs a GPU"
]


@dataclass(kw_only=True)
class Entry:
    """A step, and what is known of it."""

    step: Step
    status: Status = "waiting"
    prepared: float = 0.0  # seconds that its preparation took, stops left out
    began_at: float | None = None  # when it had the GPU, in seconds since the start of all
    seconds: float = 0.0  # that it had the GPU
    results: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    lines: list[str] = field(default_factory=list[str])  # for people
    why: list[str] = field(default_factory=list[str])  # it failed, was skipped, or needs a GPU
    clocks: dict[str, Any] | None = None  # of the GPU meanwhile
    errors: deque[str] = field(default_factory=lambda: deque[str](maxlen=LAST_LINES))

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.status not in ("waiting", "preparing", "ready", "running")


class Results:
    """The files of one schedule."""

    def __init__(self, out: Path, entries: Sequence[Entry], **about: Any) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._out, self._entries, self._about = out, entries, about
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._log = out / "log.txt"
        self._log.write_text("")

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def log(self, name: str, line: str) -> None:
        """Append a line that a step wrote to stderr."""
        with self._lock, self._log.open("a", encoding="utf-8") as log:
            if self._log.stat().st_size < LOG_BYTES:
                log.write(f"{self.elapsed:6.1f} {name}: {line}\n")

    def announce(self, name: str, line: str) -> None:
        """Print a line of a step for who watches; a closed stdout loses no result."""
        with contextlib.suppress(OSError):
            print(f"{self.elapsed:6.1f} {name}: {line}", flush=True)

    def write(self) -> None:
        """Write what is known now."""
        with self._lock:
            tree = self._about | {
                "seconds": round(self.elapsed, 1),
                "steps": [tree_of(entry) for entry in self._entries],
            }
            replace(self._out / "results.json", json.dumps(tree, indent=1))
            replace(self._out / "table.txt", "\n".join(table(self._entries)) + "\n")


def replace(path: Path, text: str) -> None:
    """Write a file in one piece."""
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def tree_of(entry: Entry) -> dict[str, Any]:
    """Return a step's entry as a tree."""
    return {
        "name": entry.step.name,
        "status": entry.status,
        "passes": entry.step.passes,
        "why": entry.why,
        "prepared_seconds": round(entry.prepared, 1),
        "began_at": entry.began_at and round(entry.began_at, 1),
        "seconds": round(entry.seconds, 1),
        "clocks": entry.clocks,
        "results": entry.results,
        "lines": entry.lines,
    }


def table(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield the lines of the table: each step, what it printed, why it failed."""
    for entry in entries:
        yield (
            f"{entry.step.name:<16}{entry.status:<13}{entry.seconds:>5.0f} s  "
            f"ready in {entry.prepared:.0f} s"
        )
        yield f"    passes: {entry.step.passes}"
        yield from (f"    {line}" for line in entry.lines)
        if entry.clocks:
            yield "    " + ", ".join(f"{name} {value}" for name, value in entry.clocks.items())
        yield from (f"    ! {line}" for line in entry.why)
        yield ""
    counts = {e.status: sum(o.status == e.status for o in entries) for e in entries}
    yield ", ".join(f"{count} {status}" for status, count in counts.items())
