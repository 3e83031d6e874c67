"""What the keeper of a home says of itself and of what it keeps: HOME/prefect/stack.json."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil

from nanochat_core.job import write_json
from nanochat_core.runtime.process_start import find_process, this_process

FORMAT = 2
_SECONDS_TO_BEGIN = 60.0  # a run that another machine took over is found later than that

State: TypeAlias = Literal["starting", "registering", "ready", "stopping", "failed"]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A keeper and its processes. Nothing in it is secret."""

    pid: int  # the keeper's
    start: str  # distinguishes the process from a later one with its number
    state: State
    api_url: str | None = None
    ui_url: str | None = None
    server: int | None = None  # pid; None while there is none, or for a server of somebody else's
    database: str | None = None  # without its password; None for a server of somebody else's
    workers: dict[str, int] = field(default_factory=dict[str, int])  # pool -> pid
    runs: tuple[str, ...] = ()  # ids of flow runs that have a process here
    problem: str | None = None  # what a person should know, and what to do about it
    hint: str | None = None

    def write(self, home: Path) -> None:
        """Put it where commands look for it."""
        path = record_path(home)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"format": FORMAT, **asdict(self)})

    @property
    def process(self) -> psutil.Process | None:
        """The keeper's live process, or None when it ended."""
        return find_process(self.pid, self.start)


def my_stack() -> Stack:
    """The record of a keeper that begins: this process."""
    me = this_process()
    return Stack(pid=me.pid, start=me.start, state="starting")


def read_stack(home: Path) -> Stack | None:
    """The last record, whether its keeper lives or not; None when there is none."""
    try:
        tree: dict[str, Any] = json.loads(record_path(home).read_text(encoding="utf-8"))
        if tree.pop("format") != FORMAT:
            return None
        tree["runs"] = tuple(tree["runs"])
        return Stack(**tree)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none, or not one of ours
        return None


def runs_of_last(home: Path) -> tuple[tuple[str, ...], float]:
    """Flow runs of the last keeper, and until when their processes may have begun here.

    A run that begins is noted a moment before Prefect is told of it.
    """
    stack = read_stack(home)
    if stack is None:
        return (), 0.0
    return stack.runs, record_path(home).stat().st_mtime + _SECONDS_TO_BEGIN


def find_stack(home: Path) -> Stack | None:
    """The stack of `home` whose keeper lives, or None."""
    stack = read_stack(home)
    return stack if stack is not None and stack.process is not None else None


def record_path(home: Path) -> Path:
    """Where the record lies."""
    return home / "prefect" / "stack.json"
