"""What Prefect does by itself when something happens. Ensuring one again makes no second."""

import json
from uuid import UUID

from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import get_client
from prefect.events.actions import CallWebhook
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from pydantic import SecretStr

from flows.evals import REGRESSED

EVAL_REGRESSED = "nanochat-eval-regressed"  # the automation's name and its block's
# What is posted; `text` is what chat services show.
_TEXT = "{{ event.resource.name }} got worse: {{ event.payload.text }}"


def ensure_automation(wanted: AutomationCore) -> UUID:
    """Make the automation called so, or make it so; gives its id. Doubles of it are deleted."""
    with get_client(sync_client=True) as client:
        found = client.read_automations_by_name(wanted.name)
        if not found:
            return client.create_automation(wanted)
        first, *doubles = found
        for double in doubles:
            client.delete_automation(double.id)
        client.update_automation(first.id, wanted)
        return first.id


def ensure_regressions_are_posted(url: str) -> UUID:
    """Have every regression posted to `url`, as {"text": ...}; gives the automation's id.

    The address is kept in a block, which Prefect encrypts, since whoever knows it may post.
    """
    webhook = Webhook(url=SecretStr(url))
    webhook.save(EVAL_REGRESSED, overwrite=True)
    block = webhook._block_document_id  # pyright: ignore[reportPrivateUsage]
    assert block is not None
    return ensure_automation(
        AutomationCore(
            name=EVAL_REGRESSED,
            description="Posts when an evaluation finds that a model got worse.",
            trigger=EventTrigger(
                posture=Posture.Reactive,
                expect={REGRESSED},
                match=ResourceSpecification({"prefect.resource.id": "nanochat.model.*"}),
                threshold=1,
            ),
            actions=[CallWebhook(block_document_id=block, payload=json.dumps({"text": _TEXT}))],
        )
    )
