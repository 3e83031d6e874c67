"""Registration of our pools, queues, deployments and automations in Prefect.

Idempotent: registering again updates what is out of date, adds no duplicates, and leaves what a
person set in Prefect's pages. What only an older version of ours registered is removed.
"""

import importlib
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client

from deployments.alerts import ALERTS, alerts
from deployments.automations import (
    Waiting,
    ensure_automation,
    recovery,
    remove_automations,
)
from deployments.evals import Recurring, deployment_of, read_recurring
from deployments.pools import CPU, GPU, POOLS, TRAIN, Pool, ensure_pool
from deployments.registry import Wanted, register
from infra.prefect.access import configured_webhook
from infra.prefect.supervisor.runs import AUTO_RESUME
from nanochat_core.errors import NanochatError

_OURS = "nanochat-flows"  # prefix of the version of deployments that this module registers
ONE_STAGE = "one-stage"  # the flow whose deployments are named after their pools
_PAGE = 200  # deployments in one response, the server's limit
JUDGED = "main"  # the model whose nightly evaluation is registered, paused


@dataclass(frozen=True, kw_only=True)
class Row:
    """One deployment in the list below."""

    flow: str  # module.function
    name: str
    pool: str
    description: str
    queue: str | None = None
    tags: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])


# `_wanted` adds one for single stages in each GPU pool, and the nightly evaluation.
ROWS = (
    Row(
        flow="flows.orchestration.pipeline.nanochat",
        name="nanochat",
        pool=CPU,
        description="Train, evaluate and report a model. Stages that are up to date are reused; "
        "a run that failed or crashed can be resumed.",
        tags=[AUTO_RESUME],
        parameters={"pool": GPU},
    ),
    Row(
        flow="flows.miniseries.flow.miniseries",
        name="miniseries",
        pool=CPU,
        description="Train models of several depths and draw how loss falls with compute.",
        tags=[AUTO_RESUME],
        parameters={"pool": GPU},
    ),
)


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """The names of what is registered, and of what this registration changed or removed."""

    pools: tuple[str, ...]
    deployments: tuple[str, ...]
    automations: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]


def deploy_all(
    *, webhook: str | None = None, waiting: Waiting | None = None, pools: Sequence[str] = ()
) -> Deployed:
    """Register everything in the Prefect server of this process's settings. Idempotent.

    Args:
        webhook: URL to which alerts are posted. Without one, existing alerts stay.
        waiting: Limits of the time until a run starts, after which it counts as crashed.
        pools: More work pools for GPU stages. A pool that was named once stays registered.

    Raises ConfigError if the webhook is not an HTTP URL.
    """
    with get_client(sync_client=True) as client:
        registered = _read_registered(client)
        # Pools named in earlier calls are known by their deployments of the flow one-stage.
        known = {item.name for item in POOLS} | {*pools, *_names(registered, ONE_STAGE)}
        all_pools = [*POOLS, *(_more(name) for name in sorted(known - {p.name for p in POOLS}))]
        wanted = list(_wanted(all_pools))
        # Made by `nanochat evals schedule`; their entrypoint and form follow the code all the same.
        names = {item.full_name for item in wanted}
        scheduled = [deployment_of(item) for item in read_recurring()]
        scheduled = [item for item in scheduled if item.full_name not in names]
        automations = recovery(waiting or Waiting())
        if webhook is not None:
            automations += alerts(webhook, pools=[pool.name for pool in all_pools])
        # Pools first: the server refuses a deployment whose pool does not exist.
        changed = [
            *(pool.name for pool in all_pools if ensure_pool(client, pool)),
            *(item.full_name for item in (*wanted, *scheduled) if register(client, item)),
            *(item.name for item in automations if ensure_automation(client, item)),
        ]
        removed = [name for name in registered if name not in {w.full_name for w in wanted}]
        for name in removed:
            client.delete_deployment(registered[name])
        # Alerts stay even when this call has no webhook: an earlier one may have set it.
        current = {item.name for item in automations}.union(ALERTS)
        removed += remove_automations(client, but=current)
    return Deployed(
        pools=tuple(pool.name for pool in all_pools),
        deployments=tuple(item.full_name for item in wanted),
        automations=tuple(item.name for item in automations),
        changed=tuple(changed),
        removed=tuple(removed),
    )


def _more(name: str) -> Pool:
    """Return a pool for GPU stages like our own, with another name."""
    return replace(next(pool for pool in POOLS if pool.name == GPU), name=name)


def _wanted(pools: Sequence[Pool]) -> Iterator[Wanted]:
    version = f"{_OURS} {importlib.metadata.version('nanochat-flows')}"
    for row in (*ROWS, *(_one_stage(pool) for pool in pools if pool.name != CPU)):
        yield Wanted(
            flow=_open_flow(row.flow),
            name=row.name,
            pool=row.pool,
            queue=row.queue,
            description=row.description,
            tags=row.tags,
            parameters=row.parameters,
            version=version,
        )
    nightly = Recurring(model=JUDGED, parameters={"pool": GPU})
    yield replace(deployment_of(nightly), version=version)


def _one_stage(pool: Pool) -> Row:
    """Return the deployment of single stages in a pool."""
    # A dispatching run names the queue itself; this one is for runs that a person starts.
    return Row(
        flow="flows.orchestration.one_stage.one_stage",
        name=pool.name,
        pool=pool.name,
        queue=TRAIN if TRAIN in pool.queues else None,
        description=f"Builds one stage on a worker of the pool {pool.name}, for another run.",
    )


def _open_flow(path: str) -> Flow[..., Any]:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _read_registered(client: SyncPrefectClient) -> dict[str, UUID]:
    """Return the ids of deployments that any version of ours registered, by full name."""
    ours: dict[str, UUID] = {}
    flows: dict[UUID, str] = {}
    offset = 0
    while page := client.read_deployments(offset=offset, limit=_PAGE):
        offset += len(page)
        for found in page:
            # Other deployments on a shared server have other versions, and are never deleted.
            if (found.version or "").startswith(f"{_OURS} "):
                if found.flow_id not in flows:
                    flows[found.flow_id] = client.read_flow(found.flow_id).name
                ours[f"{flows[found.flow_id]}/{found.name}"] = found.id
    return ours


def _names(registered: Iterable[str], flow: str) -> set[str]:
    """Return the names of a flow's deployments."""
    return {name.partition("/")[2] for name in registered if name.startswith(f"{flow}/")}


def main(pools: Sequence[str]) -> int:
    """Run `python -m deployments.deploy [POOL...]` for the server of PREFECT_API_URL."""
    try:
        deployed = deploy_all(webhook=configured_webhook(), pools=pools)
    except NanochatError as error:
        sys.stderr.write(f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return 1
    sys.stdout.write("".join(f"{line}\n" for line in told(deployed)))
    return 0


def told(deployed: Deployed) -> Iterator[str]:
    """Yield lines about the registration for a terminal."""
    yield f"work pools   {', '.join(deployed.pools)}"
    yield f"deployments  {', '.join(deployed.deployments)}"
    yield f"automations  {', '.join(deployed.automations)}"
    yield f"changed      {', '.join(deployed.changed) or 'nothing'}"
    if deployed.removed:
        yield f"removed      {', '.join(deployed.removed)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
