"""What was checked, how long it took and what was found, as a table for people."""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Entry:
    """One thing that was done and checked."""

    what: str
    seconds: float = 0.0
    found: str = ""
    state: str = "failed"


@dataclass
class Diary:
    """Entries in the order of their beginning."""

    entries: list[Entry] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @contextlib.contextmanager
    def check(self, what: str) -> Iterator[Entry]:
        """Time the block; what it finds is written into the entry. An error leaves it failed."""
        entry = Entry(what=what)
        self.entries.append(entry)
        began = time.monotonic()
        try:
            yield entry
            entry.state = "ok"
        finally:
            entry.seconds = time.monotonic() - began
            entry.found = " ".join(entry.found.split())  # a line of a table
            sys.stderr.write(f"{_line(entry)}\n")
            sys.stderr.flush()

    def table(self) -> str:
        """All of it as markdown."""
        rows = [
            "| checked | seconds | found |",
            "| --- | --- | --- |",
            *(f"| {e.what} | {e.seconds:.1f} | {e.state}: {e.found} |" for e in self.entries),
            f"| all of it | {time.monotonic() - self.began:.1f} | |",
        ]
        return "\n".join(rows)


def _line(entry: Entry) -> str:
    return f"{entry.state:6} {entry.seconds:7.1f} s  {entry.what}: {entry.found}"
