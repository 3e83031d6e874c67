"""Alerts to a webhook: failed runs, work pools without a worker, models that got worse.

They are Prefect automations, and our only ones: what resumes crashed runs is
`infra.prefect.supervisor.runs`.

The webhook's URL is stored in a block, which Prefect encrypts: any client that has it may post.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.actions import CallWebhook
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.types import SecretDict
from pydantic import SecretStr

from flows.evals.flow import REGRESSED
from infra.prefect.supervisor.runs import FLOWS
from nanochat_core.errors import ConfigError

TAG = "nanochat-flows"  # of every automation of ours
BLOCK = "nanochat-webhook"  # stores the URL
RUN_FAILED = "nanochat-run-failed"
POOL_NOT_READY = "nanochat-pool-not-ready"
EVAL_REGRESSED = "nanochat-eval-regressed"
_ID = "prefect.resource.id"
ALERTS = (RUN_FAILED, POOL_NOT_READY, EVAL_REGRESSED)


def alerts(url: str, *, pools: Sequence[str]) -> list[AutomationCore]:
    """Return automations that post alerts as {"text": ...} to `url`; store it in the block.

    Raises ConfigError if `url` is not an HTTP URL.
    """
    block = _save_address(url)
    return [
        _post(
            block,
            name=RUN_FAILED,
            description="Posts when a run has failed and a person must fix the cause.",
            event="prefect.flow-run.Failed",
            match={_ID: "prefect.flow-run.*"},
            # Without one-stage: the run that requested the stage fails too, and is posted.
            related=[
                {
                    "prefect.resource.role": "flow",
                    "prefect.resource.name": [name for name in FLOWS if name != "one-stage"],
                }
            ],
            text="flow.name ~ ' failed: ' ~ flow_run.name ~ ': ' ~ (flow_run.state.message or '')",
        ),
        _post(
            block,
            name=POOL_NOT_READY,
            description="Posts when no worker of a work pool has sent a heartbeat for 90 s.",
            event="prefect.work-pool.not-ready",
            match={_ID: "prefect.work-pool.*", "prefect.resource.name": list(pools)},
            text="'no worker runs for the work pool ' ~ event.resource.name",
        ),
        _post(
            block,
            name=EVAL_REGRESSED,
            description="Posts when an evaluation finds that a model got worse.",
            event=REGRESSED,
            match={_ID: "nanochat.model.*"},
            text="event.resource.name ~ ' got worse: ' ~ event.payload.text",
        ),
    ]


def _post(
    block: UUID,
    *,
    name: str,
    description: str,
    event: str,
    match: Mapping[str, Any],
    text: str,
    related: Sequence[Mapping[str, Any]] = (),
) -> AutomationCore:
    """Return an automation that posts `text`, a Jinja expression, at each `event` that matches."""
    return AutomationCore(
        name=name,
        description=description,
        tags=[TAG],
        trigger=EventTrigger(
            posture=Posture.Reactive,
            expect={event},
            match=ResourceSpecification(dict(match)),
            match_related=[ResourceSpecification(dict(labels)) for labels in related],
            threshold=1,
        ),
        # The filter quotes and escapes the text, which may contain anything, as a JSON string.
        actions=[
            CallWebhook(block_document_id=block, payload=f'{{"text": {{{{ ({text}) | tojson }}}}}}')
        ],
    )


def _save_address(url: str) -> UUID:
    """Store the URL in the block; return the block's id, which stays."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            "the webhook is not an address", hint="set NANOCHAT_WEBHOOK to a URL with https://"
        )
    given = {"url": SecretStr(url), "headers": SecretDict({"Content-Type": "application/json"})}
    block: Any  # Prefect types what it loads and saves as awaitable
    try:
        block = Webhook.load(BLOCK)  # what a user set in Prefect's pages stays, such as `verify`
        for name, value in given.items():
            setattr(block, name, value)
    except ValueError:  # Prefect's error for a block that does not exist
        block = Webhook(**given)
    return block.save(BLOCK, overwrite=True)


def ensure_automation(client: SyncPrefectClient, wanted: AutomationCore) -> bool:
    """Create or update the automation of this name; return whether anything changed.

    Idempotent. Duplicates are deleted. An automation that a person switched off stays off.
    """
    found = client.read_automations_by_name(wanted.name)
    if not found:
        client.create_automation(wanted)
        return True
    # Prefect's names are not unique: two processes that create one at once make two.
    first, *doubles = found
    for double in doubles:
        client.delete_automation(double.id)
    wanted = wanted.model_copy(update={"enabled": first.enabled})
    if _facts(first) == _facts(wanted):
        return bool(doubles)
    client.update_automation(first.id, wanted)
    return True


def remove_other_automations(client: SyncPrefectClient) -> list[str]:
    """Delete our automations except the alerts; return the names of the deleted ones."""
    found = [a for a in client.read_automations() if TAG in a.tags and a.name not in ALERTS]
    for automation in found:
        client.delete_automation(automation.id)
    return [automation.name for automation in found]


def _facts(automation: AutomationCore) -> dict[str, Any]:
    """Return an automation's content for comparison, without ids that the server assigns."""
    facts = AutomationCore.model_dump(automation, mode="json", exclude={"id", "owner_resource"})
    facts["trigger"].pop("id", None)
    # Sets, which are dumped in any order.
    for name in ("after", "expect", "for_each"):
        facts["trigger"][name] = sorted(facts["trigger"][name])
    return facts
