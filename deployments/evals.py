"""Evaluations that recur: one deployment of the flow `nanochat-eval` for each model.

Applying one again changes it and makes no second. A deployment is its schedule's switch: it can be
paused, set going and started by hand in Prefect's pages. A worker of the pool `cpu` runs it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound
from prefect.schedules import Cron
from prefect.types.entrypoint import EntrypointType
from prefect.workers.process import ProcessWorker

from flows.evals import nanochat_eval
from flows.suites import NIGHTLY, key_of
from nanochat_core.errors import ConfigError

POOL = "cpu"  # of processes on the workers' own machines
TAG = "nanochat-eval"
_SLUG = "recurring"  # the one schedule of each deployment; applied again, it is the same one


@dataclass(frozen=True, kw_only=True)
class Recurring:
    """An evaluation that recurs."""

    model: str
    cron: str = NIGHTLY
    timezone: str = "UTC"
    paused: bool = True
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the flow, but model
    environment: Mapping[str, str] = field(default_factory=dict[str, str])  # of its process

    @property
    def name(self) -> str:
        """The deployment's name."""
        return key_of(self.model)


def apply(recurring: Recurring) -> UUID:
    """Make the deployment, or make it so; gives its id. The pool is made when it is missing.

    Raises ConfigError for a schedule or a time zone that is none.
    """
    schedule = Cron(recurring.cron, timezone=_checked(recurring), slug=_SLUG)
    ensure_pool(POOL)
    # The module's path: a worker imports what is installed, and needs no copy of the code.
    deployment: Any = nanochat_eval.to_deployment(
        recurring.name,
        entrypoint_type=EntrypointType.MODULE_PATH,
        work_pool_name=POOL,
        job_variables={"env": dict(recurring.environment)},
        schedules=[schedule],
        paused=recurring.paused,
        parameters={"model": recurring.model, **recurring.parameters},
        description=f"Judges {recurring.model} again. Costs nothing while it does not change.",
        tags=[TAG],
    )
    return deployment.apply()


def remove(model: str) -> bool:
    """Delete the model's deployment, runs that are only scheduled included; whether it was there.

    What it found so far stays in the store.
    """
    with get_client(sync_client=True) as client:
        try:
            found = client.read_deployment_by_name(f"{nanochat_eval.name}/{key_of(model)}")
        except ObjectNotFound:
            return False
        client.delete_deployment(found.id)
    return True


def read_recurring() -> list[Recurring]:
    """Every evaluation that recurs, by model."""
    with get_client(sync_client=True) as client:
        named = FlowFilter(name=FlowFilterName(any_=[nanochat_eval.name]))
        found = client.read_deployments(flow_filter=named)
    return sorted(filter(None, map(_recurring, found)), key=lambda item: item.model)


def ensure_pool(name: str) -> None:
    """Make a pool of processes called `name` unless there is a pool called so."""
    with get_client(sync_client=True) as client:
        if not _has_pool(client, name):
            client.create_work_pool(
                WorkPoolCreate(
                    name=name,
                    type="process",
                    base_job_template=ProcessWorker.get_default_base_job_template(),
                )
            )


def _has_pool(client: SyncPrefectClient, name: str) -> bool:
    try:
        client.read_work_pool(name)
    except ObjectNotFound:
        return False
    return True


def _recurring(deployment: DeploymentResponse) -> Recurring | None:
    """What a deployment says; None of one that is no schedule of ours."""
    model = (deployment.parameters or {}).get("model")
    for item in deployment.schedules:
        if model and isinstance(item.schedule, CronSchedule):
            return Recurring(
                model=model,
                cron=item.schedule.cron,
                timezone=item.schedule.timezone or "UTC",
                paused=deployment.paused or not item.active,
                parameters={k: v for k, v in deployment.parameters.items() if k != "model"},
            )
    return None


def _checked(recurring: Recurring) -> str:
    """The time zone, once Prefect takes it and the schedule."""
    zone = recurring.timezone
    try:
        CronSchedule(cron=recurring.cron, timezone=None)
    except ValueError:
        raise ConfigError(
            f"'{recurring.cron}' is not a schedule",
            hint='minute, hour, day, month, weekday: "0 3 * * *" is every night at three',
        ) from None
    try:
        CronSchedule(cron=recurring.cron, timezone=zone)
    except ValueError:
        raise ConfigError(
            f"there is no time zone '{zone}'", hint="for example UTC or Europe/Berlin"
        ) from None
    return zone
