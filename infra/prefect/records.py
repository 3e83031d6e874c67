"""Find the processes of a home: its Prefect server and the supervisor of `nanochat up`.

HOME/prefect/server.json names the server, which outlives the command that started it. The
supervisor holds HOME/prefect/supervisor.lock, in which its process is named.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from nanochat_core.job import write_json
from nanochat_core.runtime.process_start import ProcessRef, find_process

HOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Server:
    """A Prefect server on this machine."""

    port: int
    pid: int
    start: str  # distinguishes the process from a later one with its number

    @property
    def process(self) -> psutil.Process | None:
        """The live process, or None if it ended."""
        return find_process(self.pid, self.start)

    @property
    def ui_url(self) -> str:
        """The address of Prefect's pages."""
        return f"http://{HOST}:{self.port}"

    @property
    def api_url(self) -> str:
        """The address of the API, for Prefect's clients."""
        return f"{self.ui_url}/api"


def write_record(home: Path, server: Server) -> None:
    """Write the record where commands look for it."""
    path = server_path(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(server))


def find_process_of_server(home: Path) -> Server | None:
    """Return the recorded server if its process lives, whether it answers or not; else None."""
    try:
        tree = json.loads(server_path(home).read_text(encoding="utf-8"))
        server = Server(port=tree["port"], pid=tree["pid"], start=tree["start"])
    except (OSError, ValueError, KeyError, TypeError):  # none, or not one of ours
        return None
    return server if server.process is not None else None


def find_supervisor(home: Path) -> psutil.Process | None:
    """Return the process that supervises the home's server and workers; None if there is none."""
    found = ProcessRef.find(supervisor_lock(home))
    return found and find_process(found.pid, found.start)


def server_path(home: Path) -> Path:
    """Return the path of the server's record."""
    return home / "prefect" / "server.json"


def supervisor_lock(home: Path) -> Path:
    """Return the path of the lock that the supervisor holds."""
    return home / "prefect" / "supervisor.lock"
