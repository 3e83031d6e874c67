"""One Prefect worker for each pool: its command, its environment, and its end with its keeper.

`python -m infra.prefect.supervisor.workers ARGUMENTS` is `prefect ARGUMENTS`, ended by the kernel
when the keeper dies: a worker that nobody keeps would go on taking runs for ever.
"""

import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from infra.prefect.access import configured_api_url
from infra.prefect.server import client_environment, own_environment
from infra.prefect.supervisor.processes import STACK
from nanochat_core.worker import LAUNCHER_VARIABLE, die_with_parent

# How often a flow run says that it lives: Prefect's least. How long its silence may last is worked
# out from this; see deployments/automations.py.
HEARTBEAT_SECONDS = 30
QUERY_SECONDS = 2  # between a worker's looks for runs
PREFETCH_SECONDS = 2  # how long before its time a scheduled run is taken
RUNS_OF_CPU = 6  # side by side: flows that wait for their GPU stages count too


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A work pool of processes, and how many runs this machine takes from it at once."""

    name: str
    limit: int

    @property
    def worker(self) -> str:
        """The worker's name in Prefect's pages. The same after a restart: it is the same one."""
        return f"{socket.gethostname()}-{self.name}"


def pool_called(name: str) -> Pool:
    """Runs of a GPU pool have the machine's GPUs to themselves."""
    return Pool(name=name, limit=RUNS_OF_CPU if name == "cpu" else 1)


def worker_command(pool: Pool) -> list[str]:
    """What starts the pool's worker."""
    return [
        *(sys.executable, "-m", "infra.prefect.supervisor.workers", "worker", "start"),
        *("--pool", pool.name, "--type", "process", "--name", pool.worker),
        *("--limit", str(pool.limit), "--prefetch-seconds", str(PREFETCH_SECONDS)),
    ]


def worker_environment(home: Path, api_url: str, *, store: str | None = None) -> dict[str, str]:
    """What a worker and the flows that it runs are told; `store` as None is the environment's."""
    inherited = own_environment() if configured_api_url() is None else own_environment(but=())
    return {
        **inherited,
        **client_environment(home, api_url, console_logs=True),
        STACK: str(home),
        "NANOCHAT_HOME": str(home),
        **({} if store is None else {"NANOCHAT_STORE": store}),
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "PREFECT_WORKER_QUERY_SECONDS": str(QUERY_SECONDS),
        "PYTHONUNBUFFERED": "1",
        LAUNCHER_VARIABLE: str(os.getpid()),
    }


def main() -> None:
    """Become Prefect, with this process's arguments."""
    # A shell without job control has what it starts in the background ignore Ctrl-C, which is the
    # signal that a worker stops by.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()
    os.environ.pop(LAUNCHER_VARIABLE, None)  # of this process only, not of what it starts
    os.execv(sys.executable, [sys.executable, "-m", "prefect", *sys.argv[1:]])


if __name__ == "__main__":
    main()
