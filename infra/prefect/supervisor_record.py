"""The record of a home's keeper and its processes: HOME/prefect/stack.json.

The keeper is the supervisor process; the stack is the keeper, the Prefect server and the workers.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil

from nanochat_core.job import write_json
from nanochat_core.runtime.process_start import find_process, this_process

FORMAT = 3
_SECONDS_TO_BEGIN = 60.0  # another machine takes a lost run over later than that

State: TypeAlias = Literal["starting", "registering", "ready", "stopping", "failed"]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A keeper and its processes. Nothing in it is secret."""

    pid: int  # the keeper's
    start: str  # distinguishes the process from a later one with its number
    state: State
    api_url: str | None = None
    ui_url: str | None = None
    server: int | None = None  # pid; None while none runs, or for a shared server
    database: str | None = None  # without its password; None for a shared server
    workers: dict[str, int] = field(default_factory=dict[str, int])  # pool -> pid
    runs: tuple[str, ...] = ()  # ids of flow runs that have a process here
    problem: str | None = None  # an error for a person
    hint: str | None = None  # and its remedy

    def write(self, home: Path) -> None:
        """Write the record where commands look for it."""
        path = record_path(home)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"format": FORMAT, **asdict(self)})

    @property
    def process(self) -> psutil.Process | None:
        """Return the keeper's live process, or None if it ended."""
        return find_process(self.pid, self.start)


def my_stack() -> Stack:
    """Return the first record of this process as the keeper."""
    me = this_process()
    return Stack(pid=me.pid, start=me.start, state="starting")


def read_stack(home: Path) -> Stack | None:
    """Return the last record, whether its keeper lives or not; None if there is none."""
    try:
        tree: dict[str, Any] = json.loads(record_path(home).read_text(encoding="utf-8"))
        if tree.pop("format") != FORMAT:
            return None
        tree["runs"] = tuple(tree["runs"])
        return Stack(**tree)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none, or not one of ours
        return None


def runs_of_last(home: Path) -> tuple[tuple[str, ...], float]:
    """Return the flow runs of the last keeper, and the time until which they may have begun here.

    The time is in unix seconds; a run that began later runs elsewhere.
    """
    stack = read_stack(home)
    if stack is None:
        return (), 0.0
    # A run is recorded a moment before Prefect learns that it began, so its start may be later than
    # the last write of the record.
    return stack.runs, record_path(home).stat().st_mtime + _SECONDS_TO_BEGIN


def find_stack(home: Path) -> Stack | None:
    """Return the stack of `home` if its keeper lives, else None."""
    stack = read_stack(home)
    return stack if stack is not None and stack.process is not None else None


def record_path(home: Path) -> Path:
    """Return the path of the record."""
    return home / "prefect" / "stack.json"
