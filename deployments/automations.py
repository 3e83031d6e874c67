"""Prefect automations that recover lost runs: they crash silent ones and resume crashed ones, until
one has crashed too often.

They match only deployed runs of our flows, since only those are sure to send heartbeats often
enough. Runs of other flows on the same server are left alone.
"""

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from deployments.pools import PROCESS
from infra.prefect.supervisor.runs import AUTO_RESUME, AUTOMATION
from infra.prefect.supervisor.workers import HEARTBEAT_SECONDS

FLOWS = ("nanochat", "nanochat-eval", "sweep", "one-stage")
TAG = "nanochat-flows"  # of every automation of ours

ZOMBIE_SECONDS = 3 * HEARTBEAT_SECONDS  # three missed heartbeats
# Between a worker's taking a run and the run's start.
PENDING_MINUTES = 5  # a process starts in seconds; on a busy machine, in a minute
QUEUED_MINUTES = 60  # other infrastructure, such as Kubernetes, may wait for a node
# A worker reports a killed process twice, some six seconds apart. If the run were resumed at the
# first report, the second one would set the running attempt to Crashed.
SETTLED_SECONDS = 10
# What crashes before the flow begins, as code that does not load, is resumed every half minute or
# so. A machine that is lost is not lost that often.
MOST_CRASHES = 20
CRASH_MINUTES = 60

RUN = "prefect.flow-run."
ID = "prefect.resource.id"
_OURS: tuple[dict[str, Any], ...] = (
    {"prefect.resource.role": "flow", "prefect.resource.name": list(FLOWS)},
    {"prefect.resource.role": "deployment"},
)
_RESUMED: dict[str, Any] = {ID: f"prefect.tag.{AUTO_RESUME}", "prefect.resource.role": "tag"}


def recovery() -> list[AutomationCore]:
    """Return the automations that recover lost runs.

    Those of runs that a worker took and that never began are one for pools of processes and one for
    pools of all other types.
    """
    stuck = [
        _after_silence(
            name,
            f"Sets a run of {where} that did not start within {minutes} min to Crashed: its worker "
            "is gone.",
            after=["Pending", "Submitting", "InfrastructurePending"],
            seconds=60 * minutes,
            related=[{"prefect.resource.role": "work-pool", "prefect.work-pool.type": pool_type}],
            message=f"did not start within {minutes} min",
        )
        for name, where, pool_type, minutes in (
            ("nanochat-stuck-pending", "a pool of processes", PROCESS, PENDING_MINUTES),
            ("nanochat-stuck-queued", "another pool", f"!{PROCESS}", QUEUED_MINUTES),
        )
    ]
    zombies = _after_silence(
        "nanochat-crash-zombies",
        f"Sets a run without a heartbeat for {ZOMBIE_SECONDS} s to Crashed: its machine is gone.",
        after=["heartbeat"],
        seconds=ZOMBIE_SECONDS,
        message=f"no heartbeat for {ZOMBIE_SECONDS} s",
    )
    return [zombies, *stuck, resume_crashed(), fail_what_keeps_crashing()]


def resume_crashed() -> AutomationCore:
    """Return the automation that resumes crashed runs with the tag AUTO_RESUME."""
    # A flow that begins counts its starts itself, and fails after too many without progress: see
    # check_restart_limit. One that does not begin is failed by the automation below.
    return _after_silence(
        AUTOMATION,
        f"Resumes a crashed run with the tag {AUTO_RESUME} after {SETTLED_SECONDS} s.",
        after=["Crashed"],
        seconds=SETTLED_SECONDS,
        related=[_RESUMED],
        state=StateType.SCHEDULED,
        state_name="AwaitingRetry",
        message="resumed by itself after a crash",
    )


def fail_what_keeps_crashing() -> AutomationCore:
    """Return the automation that ends the resuming of a run that crashes again and again."""
    often = f"crashed {MOST_CRASHES} times within {CRASH_MINUTES} min"
    return _automation(
        "nanochat-fail-crashing",
        f"Sets a run with the tag {AUTO_RESUME} that {often} to Failed, which is not resumed.",
        EventTrigger(
            posture=Posture.Reactive,
            expect={f"{RUN}Crashed"},
            match=ResourceSpecification({ID: f"{RUN}*"}),
            match_related=[ResourceSpecification(labels) for labels in (*_OURS, _RESUMED)],
            for_each={ID},
            threshold=MOST_CRASHES,
            within=timedelta(minutes=CRASH_MINUTES),
        ),
        ChangeFlowRunState(state=StateType.FAILED, name=None, message=often, force=False),
    )


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


def _after_silence(
    name: str,
    description: str,
    *,
    after: Collection[str],
    seconds: int,
    related: Sequence[dict[str, Any]] = (),
    state: StateType = StateType.CRASHED,
    state_name: str | None = None,
    message: str,
) -> AutomationCore:
    """Return an automation that sets the state of a run without any event for `seconds` after one.

    `after` are the names of that event, `related` what its resources must be besides ours.
    """
    trigger = EventTrigger(
        posture=Posture.Proactive,
        after={f"{RUN}{event}" for event in after},
        expect={f"{RUN}*"},
        match=ResourceSpecification({ID: f"{RUN}*"}),
        match_related=[ResourceSpecification(labels) for labels in (*_OURS, *related)],
        for_each={ID},
        threshold=1,
        within=timedelta(seconds=seconds),
    )
    # Without force Prefect's rules of transitions apply: a run that ended meanwhile stays ended.
    action = ChangeFlowRunState(state=state, name=state_name, message=message, force=False)
    return _automation(name, description, trigger, action)


def _automation(
    name: str, description: str, trigger: EventTrigger, action: ChangeFlowRunState
) -> AutomationCore:
    return AutomationCore(
        name=name, description=description, tags=[TAG], trigger=trigger, actions=[action]
    )
