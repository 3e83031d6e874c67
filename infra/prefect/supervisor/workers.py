"""A pool's Prefect worker, which ends with its supervisor, and the processes of its runs.

`python -m infra.prefect.supervisor.workers ARGUMENTS` is `prefect ARGUMENTS`, ended by the kernel
when the supervisor dies: a worker without one would take runs for ever.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from infra.prefect.access import configured_api_url
from infra.prefect.server import client_environment, own_environment
from infra.prefect.supervisor.processes import (
    SECONDS_TO_SAVE,
    STACK,
    Attempt,
    ManagedProcess,
    attempts_of,
)
from infra.prefect.supervisor.runs import is_polling
from nanochat_core.worker import LAUNCHER_VARIABLE, die_with_parent

# Interval of a flow run's heartbeats: Prefect's minimum. The silence after which a run counts as
# lost follows from it; see deployments/automations.py.
HEARTBEAT_SECONDS = 30
QUERY_SECONDS = 2  # between two polls of a worker
PREFETCH_SECONDS = 2  # how long before its time a scheduled run is taken
RUNS_OF_CPU = 6  # at once, including flows that only wait for their GPU stages
_SECONDS_TO_DIE = 8.0  # a worker that is asked to end outlives its runs by less


def runs_at_once(pool: str) -> int:
    """Return how many runs this machine takes from a pool at once: one of a GPU pool, all GPUs."""
    return RUNS_OF_CPU if pool == "cpu" else 1


def worker_name(pool: str) -> str:
    """Return the name of this machine's worker in Prefect's pages, the same after a restart."""
    return f"{socket.gethostname()}-{pool}"


def worker_command(pool: str) -> list[str]:
    """Return the command that starts the pool's worker."""
    return [
        *(sys.executable, "-m", "infra.prefect.supervisor.workers", "worker", "start"),
        *("--pool", pool, "--type", "process", "--name", worker_name(pool)),
        *("--limit", str(runs_at_once(pool)), "--prefetch-seconds", str(PREFETCH_SECONDS)),
    ]


def worker_environment(home: Path, api_url: str, *, store: str | None = None) -> dict[str, str]:
    """Return the environment of a worker and its flows; `store` None means the environment's."""
    # At a shared server the PREFECT_... variables of the person are meant for the worker.
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


class PrefectWorker:
    """One pool's worker and the processes of its runs."""

    def __init__(
        self, pool: str, home: Path, *, store: str | None, log: Callable[[str], None]
    ) -> None:
        self.pool = pool
        output = home / "prefect" / f"worker-{pool}.log"
        self.process = ManagedProcess(
            f"worker {pool}", worker_command(pool), output=output, log=log
        )
        self._home = home
        self._store = store
        # Runs by pid, each with the monotonic seconds at which its process was last seen: also
        # those that ended in the last _SECONDS_TO_DIE, and those of a worker that is gone.
        self._seen: dict[int, tuple[Attempt, float]] = {}

    @property
    def attempts(self) -> list[Attempt]:
        """The runs that would be lost if the worker ended now."""
        return [attempt for attempt, _ in self._seen.values()]

    def look(self, api_url: str) -> list[str]:
        """Restart the worker if it ended; return the flow runs that were lost with the last one."""
        self.process.ended()
        if self.process.pid is not None:
            self._follow()
            return []
        # A worker that is asked to end kills its runs and does not report them to Prefect, so those
        # that ended just before it are lost too.
        for attempt in self.attempts:
            attempt.end(SECONDS_TO_SAVE)
        over = {pid: attempt for pid, (attempt, _) in self._seen.items() if attempt.is_over}
        self._seen = {pid: seen for pid, seen in self._seen.items() if pid not in over}
        # The next worker waits for the runs of the last one: until they end, the GPU is theirs.
        if not self._seen and self.process.may_start:
            self.process.start(worker_environment(self._home, api_url, store=self._store))
        return [attempt.flow_run for attempt in over.values()]

    def is_ready(self, api_url: str) -> bool:
        """Return whether the worker polls for runs."""
        return not self.process.is_over and is_polling(
            api_url, self.pool, worker_name(self.pool), since=self.process.since
        )

    def suspend(self) -> None:
        """Suspend the worker: it takes no other run, and does not kill those that save."""
        self.process.signal(signal.SIGSTOP)
        self._follow()

    def stop(self) -> None:
        """Ask the worker to end, suspended or not."""
        # SIGTERM stays pending while it is suspended, so it takes no run once SIGCONT wakes it.
        self.process.signal(signal.SIGTERM)
        self.process.signal(signal.SIGCONT)

    def _follow(self) -> None:
        """Find the worker's runs."""
        if (pid := self.process.pid) is None:
            return
        now = time.monotonic()
        for attempt in attempts_of(pid):
            self._seen[attempt.process.pid] = attempt, now
        self._seen = {p: seen for p, seen in self._seen.items() if now - seen[1] < _SECONDS_TO_DIE}


def main() -> None:
    """Become Prefect, with this process's arguments."""
    # A shell without job control starts background processes with SIGINT ignored, and SIGINT is
    # the signal that stops a worker.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()
    os.environ.pop(LAUNCHER_VARIABLE, None)  # of this process only, not of what it starts
    os.execv(sys.executable, [sys.executable, "-m", "prefect", *sys.argv[1:]])


if __name__ == "__main__":
    main()
