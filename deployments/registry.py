"""Creation and update of Prefect deployments.

What the code decides (entry point, form, description) is always updated. What a person may have
changed in Prefect's pages (schedules, pauses, parameters, pools) is left alone, unless that person
registers the deployment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound
from prefect.utilities.schema_tools.validation import is_valid

from flows.run_request import LABEL

_SLUG = "recurring"  # identifies a deployment's schedule, so that an update adds no second one


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The desired state of a deployment."""

    flow: Flow[..., Any]
    name: str
    pool: str
    queue: str | None = None
    description: str
    tags: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    environment: Mapping[str, str] = field(default_factory=dict[str, str])  # of the flow's process
    schedule: CronSchedule | None = None
    paused: bool = False
    version: str | None = None

    @property
    def full_name(self) -> str:
        """Prefect's full name of it: flow/deployment."""
        return f"{self.flow.name}/{self.name}"

    @property
    def entrypoint(self) -> str:
        """The flow's import path: a worker imports the installed package, not a copy of it."""
        return f"{self.flow.fn.__module__}.{self.flow.fn.__name__}"

    @property
    def form(self) -> dict[str, Any]:
        """The JSON schema of the flow's parameters, for the form and for the server's checks."""
        schema = self.flow.parameters.model_dump(mode="json", exclude_unset=True)
        for name, rules in schema["properties"].items():
            # Prefect has set the title to the parameter's name.
            rules["title"] = rules.pop(LABEL, name)
            # A field that may be left empty. With a default of null it would accept null only.
            if "default" in rules and rules["default"] is None:
                del rules["default"]
        return {**schema, "additionalProperties": False}


def register(client: SyncPrefectClient, wanted: Wanted, *, by_person: bool = False) -> bool:
    """Create or update the deployment; return whether anything changed. Idempotent.

    With `by_person` a person registers it, and everything is set as it is `wanted`.
    """
    found = find(client, wanted.full_name)
    if found is None or by_person:
        _create(client, wanted)
        return True
    if not (changes := _of_the_code(wanted, found)):
        return False
    client.update_deployment(found.id, DeploymentUpdate(**changes))
    return True


def find(client: SyncPrefectClient, full_name: str) -> DeploymentResponse | None:
    """Return the deployment of this name, or None."""
    try:
        return client.read_deployment_by_name(full_name)
    except ObjectNotFound:
        return None


def _create(client: SyncPrefectClient, wanted: Wanted) -> None:
    """Create the deployment, or set everything of one that exists."""
    schedules: list[DeploymentScheduleCreate] = []
    if wanted.schedule is not None:
        schedules = [DeploymentScheduleCreate(schedule=wanted.schedule, active=True, slug=_SLUG)]
    form = wanted.form
    # Without nulls, which the form does not accept.
    given = {name: value for name, value in wanted.parameters.items() if value is not None}
    client.create_deployment(
        flow_id=client.create_flow_from_name(wanted.flow.name),
        name=wanted.name,
        version=wanted.version,
        entrypoint=wanted.entrypoint,
        pull_steps=[],  # no steps that fetch code: workers have it installed
        work_pool_name=wanted.pool,
        work_queue_name=wanted.queue,
        job_variables={"env": dict(wanted.environment)} if wanted.environment else {},
        description=wanted.description,
        tags=list(wanted.tags),
        parameters=_allowed(given, form),
        parameter_openapi_schema=form,
        enforce_parameter_schema=True,
        schedules=schedules,
        paused=wanted.paused,
    )


def _of_the_code(wanted: Wanted, found: DeploymentResponse) -> dict[str, Any]:
    """Return the fields that the code decides and that are out of date."""
    form = wanted.form
    fresh: dict[str, Any] = {
        "entrypoint": wanted.entrypoint,
        "description": wanted.description,
        "enforce_parameter_schema": True,
        "parameter_openapi_schema": form,
        # New defaults added; parameters and values that the form does not accept dropped, or every
        # run of the deployment would be refused.
        "parameters": _allowed({**wanted.parameters, **(found.parameters or {})}, form),
        # Tags are only added: a person may have tagged the deployment too.
        "tags": [*found.tags, *(tag for tag in wanted.tags if tag not in found.tags)],
    }
    if wanted.version is not None:
        fresh["version"] = wanted.version
    return {name: value for name, value in fresh.items() if value != getattr(found, name)}


def _allowed(parameters: Mapping[str, Any], form: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that the form accepts, each checked alone."""
    rules = form["properties"]
    return {
        name: value
        for name, value in parameters.items()
        if name in rules and is_valid({name: value}, {"properties": {name: rules[name]}})
    }
