"""Work pools and their queues, which decide the workers that may take a run.

An existing pool is used as it is, whatever its type: only our own environment variables are written
into its template, and missing queues are created. What a person set there stays.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectAlreadyExists
from prefect.workers.process import ProcessWorker

from infra.placement import CPU_POOL
from infra.prefect.supervisor.workers import HEARTBEAT_SECONDS

CPU = CPU_POOL  # runs the flows, and stages that need no GPU
GPU = "gpu"  # runs one GPU stage at a time on each machine
TRAIN, EVAL = "train", "eval"  # queues of the pool gpu
PROCESS = "process"  # Prefect's type of the pools that we create

# Frequent heartbeats, so that a lost machine is noticed: infra/prefect/supervisor/runs.py.
ENVIRONMENT = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS)}


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A work pool that our deployments use."""

    name: str
    description: str
    queues: Mapping[str, int] = field(default_factory=dict[str, int])  # priorities; 1 goes first


POOLS = {
    CPU: Pool(name=CPU, description="Flow runs that plan and wait, and stages that need no GPU."),
    GPU: Pool(
        name=GPU,
        description="GPU stages; one worker with --limit 1 for each machine.",
        queues={TRAIN: 1, EVAL: 2},
    ),
}


def ensure_pool(client: SyncPrefectClient, pool: Pool) -> bool:
    """Create the pool, or complete an existing one; return whether anything changed.

    Its runs get our ENVIRONMENT, unless their deployment sets other values. If the pool's template
    has no variable `env`, its owner must set ENVIRONMENT for the workers.
    """
    made = WorkPoolCreate(
        name=pool.name,
        type=PROCESS,
        description=pool.description,
        base_job_template=ProcessWorker.get_default_base_job_template(),
    )
    changed = _create(client.create_work_pool, made)
    found = client.read_work_pool(pool.name)
    template = _with_environment(found.base_job_template)
    if template != found.base_job_template:
        client.update_work_pool(pool.name, WorkPoolUpdate(base_job_template=template))
        changed = True
    for name, priority in pool.queues.items():
        # An existing queue keeps its priority, which a person may have changed.
        changed |= _create(
            client.create_work_queue, name, priority=priority, work_pool_name=pool.name
        )
    return changed


def _with_environment(template: dict[str, Any]) -> dict[str, Any]:
    """Return the template with ENVIRONMENT added to the environment of its runs."""
    changed = deepcopy(template)  # the caller compares it with the original
    env = changed.get("variables", {}).get("properties", {}).get("env")
    if env is not None:
        env["default"] = {**(env.get("default") or {}), **ENVIRONMENT}
    return changed


def _create(create: Callable[..., Any], *arguments: Any, **options: Any) -> bool:
    """Create a pool or queue with these arguments if it does not exist; return whether it was."""
    try:
        create(*arguments, **options)
    except ObjectAlreadyExists:
        return False
    return True
