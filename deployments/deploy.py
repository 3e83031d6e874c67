"""Registration of our pools, queues, deployments and automations in Prefect.

Idempotent: registering again updates what is out of date, adds no duplicates, and leaves what a
person set in Prefect's pages. What only an older version of ours registered is removed.
"""

import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client

from deployments.alerts import alerts, ensure_automation, remove_other_automations
from deployments.evals import evaluation, read_evaluations, schedule_of
from deployments.pools import CPU, GPU, POOLS, TRAIN, Pool, ensure_pool
from deployments.registry import Wanted, register
from flows.orchestration.one_stage import one_stage
from flows.orchestration.pipeline import nanochat
from flows.sweep.build import sweep
from infra.prefect.access import configured_webhook
from infra.prefect.flow_runs import AUTO_RESUME
from nanochat_core.errors import NanochatError

_OURS = "nanochat-flows"  # prefix of the version of deployments that this module registers
_PAGE = 200  # deployments in one response, the server's limit
EVALUATED = "main"  # the model whose nightly evaluation is registered, paused


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """The names of what is registered, and of what this registration changed or removed."""

    pools: tuple[str, ...]
    deployments: tuple[str, ...]
    automations: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]


def deploy_all(*, webhook: str | None = None, pools: Sequence[str] = ()) -> Deployed:
    """Register everything in the Prefect server of this process's settings. Idempotent.

    Args:
        webhook: URL to which alerts are posted. Without one, existing alerts stay.
        pools: More work pools for GPU stages. A pool that was named once stays registered.

    Raises ConfigError if the webhook is not an HTTP URL.
    """
    with get_client(sync_client=True) as client:
        registered = _read_registered(client)
        # Pools named in earlier calls are known by their deployments of the flow one-stage.
        names_of = (name.partition("/") for name in registered)
        earlier = [name for flow, _, name in names_of if flow == one_stage.name]
        more = sorted({*pools, *earlier} - POOLS.keys())
        all_pools = [*POOLS.values(), *(replace(POOLS[GPU], name=name) for name in more)]
        wanted = _wanted(all_pools)
        # Made by `nanochat evals --schedule`; entrypoint and form follow the code all the same.
        names = {item.full_name for item in wanted}
        scheduled = [item for item in read_evaluations() if item.full_name not in names]
        names_of_pools = tuple(pool.name for pool in all_pools)
        automations = [] if webhook is None else alerts(webhook, pools=names_of_pools)
        # Pools first: the server refuses a deployment whose pool does not exist.
        changed = [
            *(pool.name for pool in all_pools if ensure_pool(client, pool)),
            *(item.full_name for item in (*wanted, *scheduled) if register(client, item)),
            *(item.name for item in automations if ensure_automation(client, item)),
        ]
        removed = [name for name in registered if name not in names]
        for name in removed:
            client.delete_deployment(registered[name])
        # Alerts stay even when this call has no webhook: an earlier one may have set it.
        removed += remove_other_automations(client)
    return Deployed(
        pools=names_of_pools,
        deployments=tuple(item.full_name for item in wanted),
        automations=tuple(item.name for item in automations),
        changed=tuple(changed),
        removed=tuple(removed),
    )


def _wanted(pools: Sequence[Pool]) -> list[Wanted]:
    """Return our deployments: of whole flows, of single stages in each GPU pool, of one model."""
    whole = [
        Wanted(
            flow=flow,
            name=flow.name,
            pool=CPU,
            description=flow.description or "",
            tags=[AUTO_RESUME],
            parameters={"pool": GPU},
        )
        for flow in (nanochat, sweep)
    ]
    stages = [
        Wanted(
            flow=one_stage,
            name=pool.name,
            pool=pool.name,
            # A dispatching run names the queue itself; this one is for runs that a person starts.
            queue=TRAIN if TRAIN in pool.queues else None,
            description=f"Builds one stage on a worker of the pool {pool.name}, for another run.",
        )
        for pool in pools
        if pool.name != CPU
    ]
    nightly = evaluation({"model": EVALUATED, "pool": GPU}, schedule=schedule_of())
    version = f"{_OURS} {importlib.metadata.version('nanochat-flows')}"
    return [replace(item, version=version) for item in (*whole, *stages, nightly)]


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


def main(pools: Sequence[str]) -> int:
    """Run `python -m deployments.deploy [POOL...]` for the server of PREFECT_API_URL."""
    try:
        deployed = deploy_all(webhook=configured_webhook(), pools=pools)
    except NanochatError as error:
        sys.stderr.write(f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return 1
    sys.stdout.write("".join(f"{line}\n" for line in summary(deployed)))
    return 0


def summary(deployed: Deployed) -> Iterator[str]:
    """Yield lines about the registration for a terminal."""
    for name, items in asdict(deployed).items():
        if items or name == "changed":
            yield f"{'work pools' if name == 'pools' else name:<13}{', '.join(items) or 'nothing'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
