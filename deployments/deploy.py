"""All that Prefect is told of us: pools, queues, deployments and automations.

Telling it again changes what is out of date and nothing else: no doubles, and what a person
set in Prefect's pages stays. What an older version of ours registered and is no more is removed.
"""

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client

from deployments.alerts import ALERTS, alerts
from deployments.automations import (
    AUTO_RESUME,
    Waiting,
    ensure_automation,
    recovery,
    remove_automations,
)
from deployments.evals import Recurring, deployment_of
from deployments.pools import CPU, GPU, POOLS, TRAIN, ensure_pool
from deployments.registry import Wanted, register
from infra.webhook import configured_webhook
from nanochat_core.errors import NanochatError

_OURS = "nanochat-flows"  # how the version of a deployment begins that is registered here
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


# The evaluation of every night is the one deployment more; see `_wanted`.
ROWS = (
    Row(
        flow="flows.pipeline.nanochat",
        name="nanochat",
        pool=CPU,
        description="Train, evaluate and report a model. What is up to date is reused; a run that "
        "failed or crashed goes on where it was.",
        tags=[AUTO_RESUME],
        parameters={"pool": GPU},
    ),
    Row(
        flow="flows.one_stage.one_stage",
        name=CPU,
        pool=CPU,
        description="One stage on a machine without a GPU, ordered by another run.",
    ),
    Row(
        flow="flows.one_stage.one_stage",
        name=GPU,
        pool=GPU,
        queue=TRAIN,
        description="One stage on a machine with GPUs, ordered by another run.",
    ),
    Row(
        flow="flows.miniseries.miniseries",
        name="miniseries",
        pool=CPU,
        description="Train models of several depths and draw how loss falls with compute.",
        tags=[AUTO_RESUME],
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


def deploy_all(*, webhook: str | None = None, waiting: Waiting | None = None) -> Deployed:
    """Tell the Prefect server of this process's settings all of it. Safe to repeat.

    Args:
        webhook: Address to which alerts are posted. Without one, those there are stay.
        waiting: How long a run may be about to start.

    Raises ConfigError when the webhook is no address.
    """
    automations = recovery(waiting or Waiting())
    if webhook is not None:
        automations += alerts(webhook)
    wanted = list(_wanted())
    with get_client(sync_client=True) as client:
        changed = [
            *(pool.name for pool in POOLS if ensure_pool(client, pool)),
            *(item.full_name for item in wanted if register(client, item)),
            *(item.name for item in automations if ensure_automation(client, item)),
        ]
        kept = {item.name for item in automations}
        removed = [
            *_remove_deployments(client, but={item.full_name for item in wanted}),
            *remove_automations(client, but=kept.union(ALERTS)),
        ]
    return Deployed(
        pools=tuple(pool.name for pool in POOLS),
        deployments=tuple(item.full_name for item in wanted),
        automations=tuple(item.name for item in automations),
        changed=tuple(changed),
        removed=tuple(removed),
    )


def _wanted() -> Iterator[Wanted]:
    version = f"{_OURS} {importlib.metadata.version('nanochat-flows')}"
    for row in ROWS:
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
    yield replace(deployment_of(Recurring(model=JUDGED)), version=version)


def _open_flow(path: str) -> Flow[..., Any]:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _remove_deployments(client: SyncPrefectClient, *, but: set[str]) -> list[str]:
    """Delete the deployments registered here that have none of these names; gives theirs."""
    removed: list[str] = []
    names: dict[Any, str] = {}
    for found in _read_deployments(client):
        if not (found.version or "").startswith(f"{_OURS} "):
            continue
        if found.flow_id not in names:
            names[found.flow_id] = client.read_flow(found.flow_id).name
        full_name = f"{names[found.flow_id]}/{found.name}"
        if full_name not in but:
            client.delete_deployment(found.id)
            removed.append(full_name)
    return removed


def _read_deployments(client: SyncPrefectClient) -> Iterator[Any]:
    """Every deployment of the server, a page at a time."""
    offset = 0
    while page := client.read_deployments(offset=offset, limit=200):
        yield from page
        offset += len(page)


def main() -> int:
    """`python -m deployments.deploy`: for the server that PREFECT_API_URL names."""
    try:
        deployed = deploy_all(webhook=configured_webhook())
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
    sys.exit(main())
