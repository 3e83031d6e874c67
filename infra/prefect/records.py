"""Records of a home's processes: HOME/prefect/server.json and HOME/prefect/stack.json.

The stack is what `nanochat up` starts: the supervisor, the Prefect server and the workers. The
server has a record of its own, since it may have been started by another command.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import psutil

from infra.prefect.access import SQLITE
from nanochat_core.job import write_json
from nanochat_core.runtime.process_start import find_process, this_process

HOST = "127.0.0.1"

State: TypeAlias = Literal["starting", "ready", "stopping"]
_Record = TypeVar("_Record", "Server", "Stack")


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    pid: int
    start: str  # distinguishes the process from a later one with its number

    @property
    def process(self) -> psutil.Process | None:
        """The live process, or None if it ended."""
        return find_process(self.pid, self.start)


@dataclass(frozen=True, kw_only=True)
class Server(_Recorded):
    """A Prefect server on this machine."""

    port: int
    database: str = SQLITE  # where it stores its history; a URL without its password
    is_guarded: bool = False  # asks for a password

    @property
    def ui_url(self) -> str:
        """The address of Prefect's pages."""
        return f"http://{HOST}:{self.port}"

    @property
    def api_url(self) -> str:
        """The address of the API, for Prefect's clients."""
        return f"{self.ui_url}/api"


@dataclass(frozen=True, kw_only=True)
class Stack(_Recorded):
    """A supervisor, whose process it names, and its processes. Nothing in it is secret."""

    state: State
    api_url: str | None = None
    workers: dict[str, int] = field(default_factory=dict[str, int])  # pool -> pid
    problem: str | None = None  # an error for a person
    hint: str | None = None  # and its remedy

    @property
    def ui_url(self) -> str | None:
        """The address of Prefect's pages; None while the server is not up."""
        return self.api_url and self.api_url.removesuffix("/api")


def my_stack() -> Stack:
    """Return the first record of this process as the supervisor."""
    me = this_process()
    return Stack(pid=me.pid, start=me.start, state="starting")


def write_record(home: Path, record: Server | Stack) -> None:
    """Write the record where commands look for it."""
    path = server_path(home) if isinstance(record, Server) else stack_path(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(record))


def find_process_of_server(home: Path) -> Server | None:
    """Return the recorded server if its process lives, whether it answers or not; else None."""
    server = _read(server_path(home), Server)
    return server if server is not None and server.process is not None else None


def read_stack(home: Path) -> Stack | None:
    """Return the last record, whether its supervisor lives or not; None if there is none."""
    return _read(stack_path(home), Stack)


def find_stack(home: Path) -> Stack | None:
    """Return the stack of `home` if its supervisor lives, else None."""
    stack = read_stack(home)
    return stack if stack is not None and stack.process is not None else None


def find_running(home: Path) -> Stack | None:
    """Return the stack of `home`; None if there is none, or the last one is stopping."""
    stack = find_stack(home)
    return stack if stack is not None and stack.state != "stopping" else None


def server_path(home: Path) -> Path:
    """Return the path of the server's record."""
    return home / "prefect" / "server.json"


def stack_path(home: Path) -> Path:
    """Return the path of the stack's record."""
    return home / "prefect" / "stack.json"


def _read(path: Path, kind: type[_Record]) -> _Record | None:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return kind(**{each.name: tree[each.name] for each in fields(kind) if each.name in tree})
    except (OSError, ValueError, TypeError):  # none, or not one of ours
        return None
