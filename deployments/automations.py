"""Prefect automations of ours: create, update and delete them.

They only report. What resumes crashed runs is `infra.prefect.supervisor.runs`.
"""

from collections.abc import Collection
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.events.schemas.automations import AutomationCore

TAG = "nanochat-flows"  # of every automation of ours


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


def remove_automations(client: SyncPrefectClient, *, but: Collection[str]) -> list[str]:
    """Delete our automations except those named in `but`; return the names of the deleted ones."""
    found = [a for a in client.read_automations() if TAG in a.tags and a.name not in but]
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
