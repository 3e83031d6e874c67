"""What is posted to people: failed runs, pools without a worker, models that got worse.

The address is kept in a block, which Prefect encrypts, since whoever knows it may post.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import get_client
from prefect.events.actions import CallWebhook
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.types import SecretDict
from pydantic import SecretStr

from deployments.automations import FLOWS, ID, RUN, TAG, ensure_automation
from flows.evals.flow import REGRESSED
from nanochat_core.errors import ConfigError

BLOCK = "nanochat-webhook"  # holds the address
RUN_FAILED = "nanochat-run-failed"
POOL_NOT_READY = "nanochat-pool-not-ready"
EVAL_REGRESSED = "nanochat-eval-regressed"
ALERTS = (RUN_FAILED, POOL_NOT_READY, EVAL_REGRESSED)


def alerts(url: str, *, pools: Sequence[str]) -> list[AutomationCore]:
    """Automations that post what people want to hear of, as {"text": ...}, to `url`.

    Raises ConfigError when it is no address.
    """
    block = _keep(url)
    return [
        _post(
            block,
            name=RUN_FAILED,
            description="Posts when a run has failed, which nothing but a person repairs.",
            event=f"{RUN}Failed",
            match={ID: f"{RUN}*"},
            # A stage that was run for another run is told of by that one.
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
            description="Posts when no worker of a work pool has been heard of for 90 s.",
            event="prefect.work-pool.not-ready",
            match={ID: "prefect.work-pool.*", "prefect.resource.name": list(pools)},
            text="'no worker runs for the work pool ' ~ event.resource.name",
        ),
        _regressed(block),
    ]


def ensure_regressions_are_posted(url: str) -> bool:
    """Have every regression posted to `url`; whether the automation changed.

    There is one address for all alerts: those that exist already go there from now on.
    Raises ConfigError when it is no address.
    """
    with get_client(sync_client=True) as client:
        return ensure_automation(client, _regressed(_keep(url)))


def _regressed(block: UUID) -> AutomationCore:
    return _post(
        block,
        name=EVAL_REGRESSED,
        description="Posts when an evaluation finds that a model got worse.",
        event=REGRESSED,
        match={ID: "nanochat.model.*"},
        text="event.resource.name ~ ' got worse: ' ~ event.payload.text",
    )


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
    """Posts the `text`, an expression of Prefect's templates, at each such event."""
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
        # The filter makes the text a JSON string, whatever is in it.
        actions=[
            CallWebhook(block_document_id=block, payload=f'{{"text": {{{{ ({text}) | tojson }}}}}}')
        ],
    )


def _keep(url: str) -> UUID:
    """The id of the block with this address, made or changed if need be."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            "the webhook is not an address", hint="it begins with https://; see NANOCHAT_WEBHOOK"
        )
    wanted = {"url": url, "headers": {"Content-Type": "application/json"}}
    block: Any  # Prefect types what it loads as awaitable
    try:
        block = Webhook.load(BLOCK)
    except ValueError:  # there is none
        block = None
    if block is None or _said(block) != wanted:
        block = Webhook(url=SecretStr(url), headers=SecretDict(wanted["headers"]))
        block.save(BLOCK, overwrite=True)
    found = block._block_document_id
    assert found is not None
    return found


def _said(block: Webhook) -> dict[str, Any]:
    return {"url": block.url.get_secret_value(), "headers": block.headers.get_secret_value()}
