"""All that Prefect is told of us: pools, queues, deployments and automations.

Telling it again changes what is out of date and nothing else: no doubles, and what a person
set in Prefect's pages stays. What an older version of ours registered and is no more is removed.
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
from deployments.evals import Recurring, deployment_of
from deployments.pools import CPU, GPU, POOLS, TRAIN, Pool, ensure_pool
from deployments.registry import Wanted, register
from infra.prefect.supervisor.runs import AUTO_RESUME
from infra.prefect.webhook import configured_webhook
from nanochat_core.errors import NanochatError

_OURS = "nanochat-flows"  # how the version of a deployment begins that is registered here
ONE_STAGE = "one-stage"  # the flow whose deployments are called as their pools
_PAGE = 200  # deployments that the server gives at once
JUDGED = "main"  # the model whose nightly evaluation is registered, paused


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the list of deployments."""

    flow: str  # module.function
    name: str
    pool: str
    description: str
    queue: str | None = None
    tags: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])


# Besides, each pool of GPU stages has one for single stages, and there is the evaluation of every
# night; see `_wanted`.
ROWS = (
    Row(
        flow="flows.orchestration.pipeline.nanochat",
        name="nanochat",
        pool=CPU,
        description="Train, evaluate and report a model. What is up to date is reused; a run that "
        "failed or crashed goes on where it was.",
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
    """What is registered, and what of it is new, changed or gone since the last time."""

    pools: tuple[str, ...]
    deployments: tuple[str, ...]
    automations: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]


def deploy_all(
    *, webhook: str | None = None, waiting: Waiting | None = None, pools: Sequence[str] = ()
) -> Deployed:
    """Tell the Prefect server of this process's settings all of it. Safe to repeat.

    Args:
        webhook: Address to which alerts are posted. Without one, those there are stay.
        waiting: How long a run may be about to start.
        pools: More work pools for GPU stages. One that was named once stays.

    Raises ConfigError when the webhook is no address.
    """
    with get_client(sync_client=True) as client:
        registered = _read_registered(client)
        known = {item.name for item in POOLS} | {*pools, *_names(registered, ONE_STAGE)}
        all_pools = [*POOLS, *(_more(name) for name in sorted(known - {p.name for p in POOLS}))]
        wanted = list(_wanted(all_pools))
        automations = recovery(waiting or Waiting())
        if webhook is not None:
            automations += alerts(webhook, pools=[pool.name for pool in all_pools])
        changed = [
            *(pool.name for pool in all_pools if ensure_pool(client, pool)),
            *(item.full_name for item in wanted if register(client, item)),
            *(item.name for item in automations if ensure_automation(client, item)),
        ]
        removed = [name for name in registered if name not in {w.full_name for w in wanted}]
        for name in removed:
            client.delete_deployment(registered[name])
        kept = {item.name for item in automations}.union(ALERTS)
        removed += remove_automations(client, but=kept)
    return Deployed(
        pools=tuple(pool.name for pool in all_pools),
        deployments=tuple(item.full_name for item in wanted),
        automations=tuple(item.name for item in automations),
        changed=tuple(changed),
        removed=tuple(removed),
    )


def _more(name: str) -> Pool:
    """A pool for GPU stages besides our own."""
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
    """Single stages in a pool. The caller names the queue; this is where a person's runs go."""
    return Row(
        flow="flows.orchestration.one_stage.one_stage",
        name=pool.name,
        pool=pool.name,
        queue=TRAIN if TRAIN in pool.queues else None,
        description=f"One stage on a worker of the pool {pool.name}, ordered by another run.",
    )


def _open_flow(path: str) -> Flow[..., Any]:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _read_registered(client: SyncPrefectClient) -> dict[str, UUID]:
    """By full name, the deployments that were registered here, by whatever version."""
    ours: dict[str, UUID] = {}
    flows: dict[UUID, str] = {}
    offset = 0
    while page := client.read_deployments(offset=offset, limit=_PAGE):
        offset += len(page)
        for found in page:
            if (found.version or "").startswith(f"{_OURS} "):
                if found.flow_id not in flows:
                    flows[found.flow_id] = client.read_flow(found.flow_id).name
                ours[f"{flows[found.flow_id]}/{found.name}"] = found.id
    return ours


def _names(registered: Iterable[str], flow: str) -> set[str]:
    """Names of a flow's deployments."""
    return {name.partition("/")[2] for name in registered if name.startswith(f"{flow}/")}


def main(pools: Sequence[str]) -> int:
    """`python -m deployments.deploy [POOL...]`: for the server that PREFECT_API_URL names."""
    try:
        deployed = deploy_all(webhook=configured_webhook(), pools=pools)
    except NanochatError as error:
        sys.stderr.write(f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return 1
    sys.stdout.write("".join(f"{line}\n" for line in told(deployed)))
    return 0


def told(deployed: Deployed) -> Iterator[str]:
    """What a person wants to know of it."""
    yield f"work pools   {', '.join(deployed.pools)}"
    yield f"deployments  {', '.join(deployed.deployments)}"
    yield f"automations  {', '.join(deployed.automations)}"
    yield f"changed      {', '.join(deployed.changed) or 'nothing'}"
    if deployed.removed:
        yield f"removed      {', '.join(deployed.removed)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
