"""Prefect automations that recover lost runs: they crash silent ones and resume crashed ones.

They match only deployed runs of our flows, since only those are sure to send heartbeats often
enough. Runs of other flows on the same server are left alone.
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
from infra.prefect.supervisor.runs import AUTO_RESUME, AUTOMATION
from infra.prefect.supervisor.workers import HEARTBEAT_SECONDS

FLOWS = ("nanochat", "nanochat-eval", "miniseries", "one-stage")
TAG = "nanochat-flows"  # of every automation of ours

ZOMBIE_SECONDS = 3 * HEARTBEAT_SECONDS  # three missed heartbeats
PENDING_MINUTES = 5  # a process starts in seconds; on a busy machine, in a minute
QUEUED_MINUTES = 60  # other infrastructure, such as Kubernetes, may wait for a node
# A worker reports a killed process twice, some six seconds apart. If the run were resumed at the
# first report, the second one would set the running attempt to Crashed.
SETTLED_SECONDS = 10

RUN = "prefect.flow-run."
ID = "prefect.resource.id"
_OURS = [
    {"prefect.resource.role": "flow", "prefect.resource.name": list(FLOWS)},
    {"prefect.resource.role": "deployment"},
]


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Limits of the time between a worker's taking a run and the run's start."""

    minutes: int = PENDING_MINUTES  # in pools of processes
    queued_minutes: int = QUEUED_MINUTES  # in pools of other types


def recovery(waiting: Waiting) -> list[AutomationCore]:
    """Return the automations that recover lost runs."""
    return [crash_zombies(), *crash_stuck(waiting), resume_crashed()]


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


def crash_zombies() -> AutomationCore:
    """Return the automation that crashes runs without heartbeats."""
    return AutomationCore(
        name="nanochat-crash-zombies",
        description=f"Sets a run without a heartbeat for {ZOMBIE_SECONDS} s to Crashed: "
        "its machine is gone.",
        tags=[TAG],
        trigger=_silence(after=["heartbeat"], seconds=ZOMBIE_SECONDS, related=_OURS),
        actions=_set_state(StateType.CRASHED, f"no heartbeat for {ZOMBIE_SECONDS} s"),
    )


def crash_stuck(waiting: Waiting) -> list[AutomationCore]:
    """Return automations that crash runs which a worker took and never began.

    There is one for pools of processes and one for all other types.
    """
    pools = (
        ("nanochat-stuck-pending", "a pool of processes", PROCESS, waiting.minutes),
        ("nanochat-stuck-queued", "another pool", f"!{PROCESS}", waiting.queued_minutes),
    )
    return [
        AutomationCore(
            name=name,
            description=f"Sets a run of {where} that did not start within {minutes} min to "
            "Crashed: its worker is gone.",
            tags=[TAG],
            trigger=_silence(
                after=["Pending", "Submitting", "InfrastructurePending"],
                seconds=60 * minutes,
                related=[
                    *_OURS,
                    {"prefect.resource.role": "work-pool", "prefect.work-pool.type": type_},
                ],
            ),
            actions=_set_state(StateType.CRASHED, f"did not start within {minutes} min"),
        )
        for name, where, type_, minutes in pools
    ]


def resume_crashed() -> AutomationCore:
    """Return the automation that resumes crashed runs with the tag AUTO_RESUME."""
    # Without a limit, since automations cannot count: the flow fails after too many starts without
    # progress, see check_restart_limit.
    return AutomationCore(
        name=AUTOMATION,
        description=f"Resumes a crashed run with the tag {AUTO_RESUME} after {SETTLED_SECONDS} s.",
        tags=[TAG],
        trigger=_silence(
            after=["Crashed"],
            seconds=SETTLED_SECONDS,
            related=[
                {ID: f"prefect.tag.{AUTO_RESUME}", "prefect.resource.role": "tag"},
                *_OURS,
            ],
        ),
        actions=_set_state(
            StateType.SCHEDULED, "resumed by itself after a crash", name="AwaitingRetry"
        ),
    )


def _silence(
    *, after: Collection[str], seconds: int, related: Sequence[dict[str, Any]]
) -> EventTrigger:
    """Return a trigger that fires for a flow run without any event for `seconds` after `after`."""
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


def _set_state(state: StateType, message: str, *, name: str | None = None) -> list[ActionTypes]:
    """Return the action that sets the run's state."""
    # Without force Prefect's rules of transitions apply: a run that ended meanwhile stays ended.
    return [ChangeFlowRunState(state=state, name=name, message=message, force=False)]
