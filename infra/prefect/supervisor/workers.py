"""A pool's Prefect worker, which ends with its supervisor.

`python -m infra.prefect.supervisor.workers ARGUMENTS` is `prefect ARGUMENTS`, killed by the kernel
when the supervisor dies: a worker without one would take runs for ever. Its runs end with it, after
they have saved. Its temporary files are in the home.
"""

import os
import runpy
import signal
import socket
import sys
import tempfile
from pathlib import Path

from infra.prefect.server import client_environment, own_environment, shared_server
from nanochat_core.runtime.process_start import start_of
from nanochat_core.worker import LAUNCHER_VARIABLE, die_with_parent

# Interval of a flow run's heartbeats: Prefect's minimum. The silence after which a run counts as
# lost follows from it; see runs.py.
HEARTBEAT_SECONDS = 30
SILENT_SECONDS = 3.0 * HEARTBEAT_SECONDS
QUERY_SECONDS = 2  # between two polls of a worker, and before its time a scheduled run is taken
# Process id of the worker, for the runs that it starts.
_WORKER_VARIABLE = "NANOCHAT_WORKER"
RUNS_OF_CPU = 6  # at once, including flows that only wait for their GPU stages


def worker_command(pool: str) -> list[str]:
    """Return the command that starts the pool's worker."""
    limit = RUNS_OF_CPU if pool == "cpu" else 1  # of a GPU pool one run, which has all GPUs
    return [
        *(sys.executable, "-m", __name__, "worker", "start"),
        *("--pool", pool, "--type", "process", "--name", f"{socket.gethostname()}-{pool}"),
        *("--limit", str(limit), "--prefetch-seconds", str(QUERY_SECONDS)),
    ]


def worker_environment(home: Path, api_url: str, *, store: str | None = None) -> dict[str, str]:
    """Return the environment of a worker and its flows; `store` None means the environment's."""
    return {
        **own_environment(is_shared=shared_server(home) is not None),
        **client_environment(home, api_url, console_logs=True),
        "NANOCHAT_HOME": str(home),
        **({} if store is None else {"NANOCHAT_STORE": store}),
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "PREFECT_WORKER_QUERY_SECONDS": str(QUERY_SECONDS),
        "PYTHONUNBUFFERED": "1",
        LAUNCHER_VARIABLE: str(os.getpid()),
    }


def end_with_worker() -> None:
    """Have the kernel end this process when its worker dies, if it runs a flow for a worker.

    As SIGTERM does, so the run saves and reports its end. If the worker has died already, while
    this process imported Prefect, it ends at once.
    """
    worker = os.environ.pop(_WORKER_VARIABLE, None)
    if "PREFECT__FLOW_RUN_ID" not in os.environ:
        return

    def end(*_: object) -> None:
        # The worker was the reader of its output: without one each line would raise an error.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGUSR2, end)
    die_with_parent(signal.SIGUSR2)
    if worker is not None and start_of(int(worker)) is None:
        end()


def main() -> None:
    """Run Prefect with this process's arguments."""
    # Killed: a worker that gets SIGTERM kills its runs before they have saved.
    die_with_parent(signal.SIGKILL)
    os.environ.pop(LAUNCHER_VARIABLE, None)  # of this process only, not of what it starts
    os.environ[_WORKER_VARIABLE] = str(os.getpid())
    # Prefect makes /tmp/runner_storage, which belongs to the first user of the machine who has a
    # worker. TMPDIR stays as it is: runs inherit it.
    pool = sys.argv[sys.argv.index("--pool") + 1]
    directory = Path(os.environ["NANOCHAT_HOME"], "prefect", f"worker-{pool}.tmp")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    tempfile.tempdir = str(directory)
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
