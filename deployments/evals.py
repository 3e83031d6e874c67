"""Scheduled evaluations: one deployment of the flow `nanochat-eval` for each model.

Applying one again updates it. In Prefect's pages a person can pause the deployment, resume its
schedule and start a run. A worker of the pool `cpu` runs it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True, kw_only=True)
class Recurring:
    """A scheduled evaluation of a model."""

    model: str
    cron: str = NIGHTLY
    timezone: str = "UTC"
    paused: bool = True
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])  # without `model`
    environment: Mapping[str, str] = field(default_factory=dict[str, str])  # of the flow's process
    # The deployment that it was read from. A person may have changed its model in the form.
    registered: str | None = None

    @property
    def name(self) -> str:
        """The deployment's name."""
        return self.registered or key_of(self.model)


def apply(recurring: Recurring) -> None:
    """Create or update the deployment, and its pool if it is missing.

    Raises ConfigError if the schedule or the time zone is not valid, or if the deployment of this
    name evaluates another model.
    """
    wanted = deployment_of(recurring)
    with get_client(sync_client=True) as client:
        _find(client, recurring.model)  # raises for another model's
        # The pool is missing where `nanochat up --register` has never run.
        for pool in POOLS:
            if pool.name == wanted.pool:
                ensure_pool(client, pool)
        register(client, wanted, by_person=True)


def deployment_of(recurring: Recurring) -> Wanted:
    """Return the deployment of a scheduled evaluation. Raises ConfigError like `apply`."""
    return Wanted(
        flow=nanochat_eval,
        name=recurring.name,
        pool=CPU,
        description=f"Evaluates {recurring.model} again. Reuses the result if it did not change.",
        tags=[TAG, AUTO_RESUME],
        parameters={"model": recurring.model, **recurring.parameters},
        environment=recurring.environment,
        schedule=_schedule(recurring),
        paused=recurring.paused,
    )


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


def read_recurring() -> list[Recurring]:
    """Return every scheduled evaluation, sorted by model."""
    with get_client(sync_client=True) as client:
        named = FlowFilter(name=FlowFilterName(any_=[nanochat_eval.name]))
        found = client.read_deployments(flow_filter=named)
    return sorted(filter(None, map(_recurring, found)), key=lambda item: item.model)


def _recurring(deployment: DeploymentResponse) -> Recurring | None:
    """Read a scheduled evaluation from its deployment; None if it has no model or cron schedule."""
    model = (deployment.parameters or {}).get("model")
    for item in deployment.schedules:
        if model and isinstance(item.schedule, CronSchedule):
            return Recurring(
                model=model,
                cron=item.schedule.cron,
                timezone=item.schedule.timezone or "UTC",
                # Prefect has a switch for the deployment and one for its schedule: both must be on.
                paused=deployment.paused or not item.active,
                parameters={k: v for k, v in deployment.parameters.items() if k != "model"},
                registered=deployment.name,
            )
    return None


def _schedule(recurring: Recurring) -> CronSchedule:
    # First without the time zone, so that the error names the part that is wrong.
    try:
        CronSchedule(cron=recurring.cron, timezone=None)
    except ValueError:
        raise ConfigError(
            f"'{recurring.cron}' is not a schedule",
            hint='minute, hour, day, month, weekday: "0 3 * * *" is every night at three',
        ) from None
    try:
        return CronSchedule(cron=recurring.cron, timezone=recurring.timezone)
    except ValueError:
        raise ConfigError(
            f"there is no time zone '{recurring.timezone}'",
            hint="for example UTC or Europe/Berlin",
        ) from None
