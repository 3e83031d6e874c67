"""Pools, deployments, workers and runs of the tests, as Prefect's API shows them."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.support.flows import waiting

REPOSITORY = Path(__file__).parents[3]
SECONDS = 200.0  # a run on a busy machine takes a while to start
wait_until = functools.partial(waiting.wait_until, seconds=SECONDS, every=0.1)


def client() -> Any:
    """Prefect's client."""
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


def deploy(pool: str) -> None:
    """Deploy `one-stage/<pool>`, for a test that plays the worker."""
    from flows.orchestration.one_stage import one_stage

    _make_pool(pool)
    deployment: Any = one_stage.to_deployment(pool, work_pool_name=pool)
    deployment.apply()


def _make_pool(pool: str) -> None:
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    made = WorkPoolCreate(name=pool, type="process", base_job_template=template)
    with client() as asking, contextlib.suppress(ObjectAlreadyExists):
        asking.create_work_pool(made)


def start_worker(pool: str) -> "subprocess.Popen[bytes]":
    """A worker of the pool, in a session of its own."""
    words = ["--pool", pool, "--type", "process", "--limit", "4", "--name", f"of-{pool}"]
    return subprocess.Popen(
        [sys.executable, "-m", "prefect", "worker", "start", *words],
        cwd=REPOSITORY,
        env={**os.environ, "PREFECT_WORKER_QUERY_SECONDS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def stop_worker(worker: "subprocess.Popen[bytes]") -> None:
    """End the worker and whatever it has started."""
    processes = [psutil.Process(worker.pid)] if worker.poll() is None else []
    processes += [p for parent in list(processes) for p in parent.children(recursive=True)]
    for process in processes:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    worker.wait()


def runs_of(tag: str) -> list[Any]:
    """Flow runs with a tag, the oldest first."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags

    with client() as asking:
        chosen = FlowRunFilter(tags=FlowRunFilterTags(all_=[tag]))
        return sorted(asking.read_flow_runs(flow_run_filter=chosen), key=lambda r: r.created)


def read_run(run_id: Any) -> Any:
    """A flow run as it is now."""
    with client() as asking:
        return asking.read_flow_run(run_id)


def set_state(run_id: Any, kind: str, *, force: bool = False, **state: Any) -> Any:
    """What Prefect's pages send when a button is pressed."""
    with client() as asking:
        answer = asking.request(
            "POST",
            f"/flow_runs/{run_id}/set_state",
            json={"state": {"type": kind, **state}, "force": force},
        )
        return answer.json()


def wait_for_end(run_id: Any, *, seconds: float = SECONDS) -> Any:
    """The run's state, once it is final."""

    def ended() -> Any:
        state = read_run(run_id).state
        return state if state.is_final() else None

    return wait_until(ended, seconds=seconds)


def engine_of(run_id: Any) -> psutil.Process | None:
    """The process in which a worker runs a flow run."""
    for process in psutil.process_iter(["environ"]):
        is_its = (process.info["environ"] or {}).get("PREFECT__FLOW_RUN_ID") == str(run_id)
        if is_its and "nanochat_core.worker" not in " ".join(process.cmdline()):
            return process
    return None
