"""Work pools and their queues: who may pick up which runs.

A pool that exists is used as it is, whatever its type: only our own environment variables are
written into its template, and queues that it lacks are made. What a person set there stays.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import (
    ObjectAlreadyExists,
    ObjectNotFound,
    PrefectHTTPStatusError,
)
from prefect.workers.process import ProcessWorker

from infra.placement import CPU_POOL
from infra.prefect.supervisor.workers import HEARTBEAT_SECONDS

CPU = CPU_POOL  # orchestrates, and runs stages that need no GPU
GPU = "gpu"  # runs one GPU stage at a time on each machine
TRAIN, EVAL = "train", "eval"  # queues of the pool gpu
PROCESS = "process"  # the type of pools that we make

ENVIRONMENT = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS)}


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A pool that our deployments name."""

    name: str
    description: str
    queues: Mapping[str, int] = field(default_factory=dict[str, int])  # priorities; 1 goes first


POOLS = (
    Pool(name=CPU, description="Flow runs that plan and wait, and stages that need no GPU."),
    Pool(
        name=GPU,
        description="GPU stages; one worker with --limit 1 for each machine.",
        queues={TRAIN: 1, EVAL: 2},
    ),
)


def ensure_pool(client: SyncPrefectClient, pool: Pool) -> bool:
    """Make the pool, or complete the one there is; whether anything changed.

    Its runs get our ENVIRONMENT, unless their deployment says otherwise. A pool without a variable
    `env` in its template cannot be told: there its maker has to set it.
    """
    changed = _make(client, pool)
    found = client.read_work_pool(pool.name)
    template = with_environment(found.base_job_template, ENVIRONMENT)
    if template != found.base_job_template:
        client.update_work_pool(pool.name, WorkPoolUpdate(base_job_template=template))
        changed = True
    for name, priority in pool.queues.items():
        changed |= _make_queue(client, pool, name, priority)
    return changed


def with_environment(template: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """A pool's template whose runs get these variables besides those that it gives them."""
    changed: dict[str, Any] = deepcopy(dict(template))
    env = changed.get("variables", {}).get("properties", {}).get("env")
    if env is not None:
        env["default"] = {**(env.get("default") or {}), **environment}
    return changed


def _make(client: SyncPrefectClient, pool: Pool) -> bool:
    """Whether there was no such pool before."""
    try:
        client.read_work_pool(pool.name)
    except ObjectNotFound:
        try:
            client.create_work_pool(
                WorkPoolCreate(
                    name=pool.name,
                    type=PROCESS,
                    description=pool.description,
                    base_job_template=ProcessWorker.get_default_base_job_template(),
                )
            )
        except ObjectAlreadyExists:  # made by somebody else at this moment
            return False
        return True
    return False


def _make_queue(client: SyncPrefectClient, pool: Pool, name: str, priority: int) -> bool:
    """Whether the pool had no such queue before; the priority of one that is there stays."""
    try:
        client.request(
            "POST",
            "/work_pools/{work_pool_name}/queues",
            path_params={"work_pool_name": pool.name},
            json={"name": name, "priority": priority},
        )
    except PrefectHTTPStatusError as error:
        if error.response.status_code != HTTPStatus.CONFLICT:
            raise
        return False
    return True
