"""What Prefect does by itself when something happens. Ensuring an automation twice makes no second.

Runs of other people's flows on the same server are left alone: only deployed runs of our flows are
watched, since only those are known to say so often that they live.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes, ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from deployments.pools import PROCESS
from infra.prefect.supervisor.resuming import AUTOMATION
from infra.prefect.supervisor.runs import AUTO_RESUME
from infra.prefect.supervisor.workers import HEARTBEAT_SECONDS

FLOWS = ("nanochat", "nanochat-eval", "miniseries", "one-stage")
TAG = "nanochat-flows"  # of every automation of ours

ZOMBIE_SECONDS = 3 * HEARTBEAT_SECONDS  # three heartbeats missed
PENDING_MINUTES = 5  # a process starts in seconds, on a machine with much to do in a minute
QUEUED_MINUTES = 60  # other infrastructure may wait for a node
# A worker reports a killed process twice, some six seconds apart. Resumed at the first report, the
# run would be running when the second one calls it crashed.
SETTLED_SECONDS = 10

RUN = "prefect.flow-run."
ID = "prefect.resource.id"
_OURS = [
    {"prefect.resource.role": "flow", "prefect.resource.name": list(FLOWS)},
    {"prefect.resource.role": "deployment"},
]


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """How long a run may be about to start."""

    minutes: int = PENDING_MINUTES  # in pools of processes
    queued_minutes: int = QUEUED_MINUTES  # in pools of other types


def recovery(waiting: Waiting) -> list[AutomationCore]:
    """The automations that bring lost runs back."""
    return [crash_zombies(), *crash_stuck(waiting), resume_crashed()]


def ensure_automation(client: SyncPrefectClient, wanted: AutomationCore) -> bool:
    """Make the automation called so, or make it so; whether anything changed. Doubles are deleted.

    One that a person switched off stays off.
    """
    found = client.read_automations_by_name(wanted.name)
    if not found:
        client.create_automation(wanted)
        return True
    first, *doubles = found
    for double in doubles:
        client.delete_automation(double.id)
    wanted = wanted.model_copy(update={"enabled": first.enabled})
    if _facts(first) == _facts(wanted):
        return bool(doubles)
    client.update_automation(first.id, wanted)
    return True


def remove_automations(client: SyncPrefectClient, *, but: Collection[str]) -> list[str]:
    """Delete our automations that have none of these names; gives theirs."""
    found = [a for a in client.read_automations() if TAG in a.tags and a.name not in but]
    for automation in found:
        client.delete_automation(automation.id)
    return [automation.name for automation in found]


def _facts(automation: AutomationCore) -> dict[str, Any]:
    """What an automation says, without the ids that the server gives."""
    facts = AutomationCore.model_dump(automation, mode="json", exclude={"id", "owner_resource"})
    facts["trigger"].pop("id", None)
    for name in ("after", "expect", "for_each"):
        facts["trigger"][name] = sorted(facts["trigger"][name])
    return facts


def crash_zombies() -> AutomationCore:
    """Runs whose process is gone end as crashed."""
    return AutomationCore(
        name="nanochat-crash-zombies",
        description=f"A run that has not said for {ZOMBIE_SECONDS} s that it lives is crashed: "
        "its machine is gone.",
        tags=[TAG],
        trigger=_silence(after=["heartbeat"], seconds=ZOMBIE_SECONDS, related=_OURS),
        actions=_turn(StateType.CRASHED, f"no heartbeat for {ZOMBIE_SECONDS} s"),
    )


def crash_stuck(waiting: Waiting) -> list[AutomationCore]:
    """Runs that were taken and never began end as crashed; one automation for each type of pool."""
    pools = (
        ("nanochat-stuck-pending", "a pool of processes", PROCESS, waiting.minutes),
        ("nanochat-stuck-queued", "another pool", f"!{PROCESS}", waiting.queued_minutes),
    )
    return [
        AutomationCore(
            name=name,
            description=f"A run of {where} that is about to start for {minutes} min is crashed: "
            "its worker is gone.",
            tags=[TAG],
            trigger=_silence(
                after=["Pending", "Submitting", "InfrastructurePending"],
                seconds=60 * minutes,
                related=[
                    *_OURS,
                    {"prefect.resource.role": "work-pool", "prefect.work-pool.type": type_},
                ],
            ),
            actions=_turn(StateType.CRASHED, f"did not start within {minutes} min"),
        )
        for name, where, type_, minutes in pools
    ]


def resume_crashed() -> AutomationCore:
    """Crashed runs go on by themselves. How often, the flow judges: it counts its attempts."""
    return AutomationCore(
        name=AUTOMATION,
        description=f"A crashed run with the tag {AUTO_RESUME} goes on {SETTLED_SECONDS} s later "
        "where it was.",
        tags=[TAG],
        trigger=_silence(
            after=["Crashed"],
            seconds=SETTLED_SECONDS,
            related=[
                {ID: f"prefect.tag.{AUTO_RESUME}", "prefect.resource.role": "tag"},
                *_OURS,
            ],
        ),
        actions=_turn(StateType.SCHEDULED, "resumed by itself after a crash", name="AwaitingRetry"),
    )


def _silence(
    *, after: Collection[str], seconds: int, related: Sequence[dict[str, Any]]
) -> EventTrigger:
    """Fires for each flow run of which nothing more is heard for so long after such an event."""
    return EventTrigger(
        posture=Posture.Proactive,
        after={f"{RUN}{name}" for name in after},
        expect={f"{RUN}*"},
        match=ResourceSpecification({ID: f"{RUN}*"}),
        match_related=[ResourceSpecification(labels) for labels in related],
        for_each={ID},
        threshold=1,
        within=timedelta(seconds=seconds),
    )


def _turn(state: StateType, message: str, *, name: str | None = None) -> list[ActionTypes]:
    """Puts the run into this state, unless its end is known."""
    return [ChangeFlowRunState(state=state, name=name, message=message, force=False)]
