"""Scheduled evaluations: one deployment of the flow `nanochat-eval` for each model.

Applying one again updates it. In Prefect's pages a person can pause the deployment, resume its
schedule and start a run. A worker of the pool `cpu` runs it.
"""

from collections.abc import Mapping
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule

from deployments.pools import CPU, POOLS, ensure_pool
from deployments.registry import Wanted, find, register
from flows.evals.flow import nanochat_eval
from flows.evals.suite import NIGHTLY
from flows.render.text import key_of
from infra.prefect.flow_runs import AUTO_RESUME
from nanochat_core.errors import ConfigError

TAG = "nanochat-eval"


def evaluation(
    parameters: Mapping[str, Any],
    *,
    schedule: CronSchedule,
    name: str | None = None,
    paused: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Wanted:
    """Return the deployment that evaluates a model on a schedule.

    Args:
        parameters: Of the flow. The model's name is looked up at each evaluation.
        schedule: When: see `schedule_of`.
        name: Of the deployment; by default that of the model.
        paused: Whether it waits for a person to switch it on.
        environment: Of the flow's process.
    """
    model = parameters["model"]
    return Wanted(
        flow=nanochat_eval,
        name=name or key_of(model),
        pool=CPU,
        description=f"Evaluates {model} again. Reuses the result if it did not change.",
        tags=[TAG, AUTO_RESUME],
        parameters=parameters,
        environment=environment or {},
        schedule=schedule,
        paused=paused,
    )


def apply(wanted: Wanted) -> None:
    """Create or update the deployment of an evaluation, and its pool if it is missing.

    Raises ConfigError if the deployment of this name evaluates another model.
    """
    with get_client(sync_client=True) as client:
        _find(client, wanted.parameters["model"])  # raises for another model's
        # The pool is missing where `nanochat up --register` has never run.
        ensure_pool(client, POOLS[CPU])
        register(client, wanted, by_person=True)


def remove(model: str) -> bool:
    """Delete the model's deployment with its scheduled runs; return whether it existed.

    Results of earlier runs stay in the store. Raises ConfigError if the deployment of this name
    evaluates another model.
    """
    with get_client(sync_client=True) as client:
        found = _find(client, model)
        if found is not None:
            client.delete_deployment(found.id)
    return found is not None


def _find(client: SyncPrefectClient, model: str) -> DeploymentResponse | None:
    """Return the model's deployment. None means none. Raises ConfigError if it is another's."""
    found = find(client, f"{nanochat_eval.name}/{key_of(model)}")
    # sft@mine and sft-mine have one name, and the form can change a deployment's model.
    if found and (other := (found.parameters or {}).get("model", model)) != model:
        raise ConfigError(
            f"the deployment {nanochat_eval.name}/{found.name} evaluates {other}, not {model}",
            hint="change its model in Prefect's pages, or delete it there",
        )
    return found


def read_evaluations() -> list[Wanted]:
    """Return every scheduled evaluation as it is registered, sorted by model."""
    with get_client(sync_client=True) as client:
        named = FlowFilter(name=FlowFilterName(any_=[nanochat_eval.name]))
        found = client.read_deployments(flow_filter=named)
    return sorted(filter(None, map(_read, found)), key=lambda item: item.parameters["model"])


def _read(deployment: DeploymentResponse) -> Wanted | None:
    """Return a scheduled evaluation; None if it has no model or cron schedule."""
    parameters = deployment.parameters or {}
    for item in deployment.schedules:
        if parameters.get("model") and isinstance(item.schedule, CronSchedule):
            # Prefect has a switch for the deployment and one for its schedule: both must be on. A
            # person may have changed the model in the form: the name stays.
            paused = deployment.paused or not item.active
            return evaluation(
                parameters, name=deployment.name, schedule=item.schedule, paused=paused
            )
    return None


def schedule_of(cron: str = NIGHTLY, timezone: str = "UTC") -> CronSchedule:
    """Return a schedule. Raises ConfigError if it or the time zone is not valid."""
    try:
        return CronSchedule(cron=cron, timezone=timezone)
    except ValueError:
        raise ConfigError(
            f"'{cron}' is not a schedule, or '{timezone}' no time zone",
            hint='minute, hour, day, month, weekday: "0 3 * * *" is every night at three; zones '
            "are like UTC or Europe/Berlin",
        ) from None
