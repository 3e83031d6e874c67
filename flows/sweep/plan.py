"""The plan of a group: what would be built, and how long it would take; each stage counts once."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flows.identity.ref import short
from flows.plan.plan import STATES, Plan, StagePlan, make_plan
from flows.plan.render import totals
from flows.render.table import columns
from flows.render.text import duration
from flows.sweep.members import Member, RunGroup, Unit, units_of
from infra.placement import Placement
from infra.storage.base import Store


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """The plan of all stages of a group."""

    group: RunGroup
    units: tuple[Unit, ...]  # inputs first
    plan: Plan  # a stage for each unit

    @property
    def items(self) -> Iterator[tuple[Unit, StagePlan]]:
        """The units with their plans."""
        return zip(self.units, self.plan.stages, strict=True)


def plan_group(group: RunGroup, store: Store, work: Path, placement: Placement) -> GroupPlan:
    """Plan every member. Raises what `flows.plan.plan.make_plan` raises."""
    plans = {
        member.label: make_plan(member.profile.run, store, work, placement=placement)
        for member in group.members
    }
    units = units_of(group)
    # A unit has the same settings and inputs for all its members: any one's plan will do.
    items = tuple(plans[unit.members[0].label].of(unit.stage.name) for unit in units)
    return GroupPlan(group=group, units=units, plan=Plan(store=store.url, stages=items))


def lines_of(planned: GroupPlan, *, width: int | None = None) -> list[str]:
    """Return the plan for people: shared stages, a table of the members, and the sum.

    width: see `columns`.
    """
    # Stages of one member alone are in the table; those that several share stand above it.
    alone = [(unit, item) for unit, item in planned.items if len(unit.members) == 1]
    several = [(unit, item) for unit, item in planned.items if len(unit.members) > 1]
    stages = list(dict.fromkeys(unit.stage.name for unit, _ in alone))
    table = [[*planned.group.head, *stages, "about"]]
    for member in planned.group.members:
        mine = {unit.stage.name: item for unit, item in alone if unit.members == (member,)}
        table.append(_row(member, mine, stages))
    return [
        *columns([_shared_row(unit, item) for unit, item in several], width=width),
        "",
        *columns(table, right=range(1, len(planned.group.head)), width=width),
        "",
        totals(planned.plan)["summary"],
    ]


def plan_to_json(planned: GroupPlan) -> str:
    """Return the plan as JSON, for programs."""
    tree = {
        "format": 1,
        "name": planned.group.name,
        "profile": planned.group.profile,
        "store": planned.plan.store,
        **totals(planned.plan),
        "stages": [
            {
                "stage": unit.stage.name,
                "members": [member.label for member in unit.members],
                "depths": [member.depth for member in unit.members],
                "state": item.state,
                "fingerprint": item.fingerprint,
                "estimate": asdict(item.estimate) if item.estimate else None,
            }
            for unit, item in planned.items
        ],
    }
    return json.dumps(tree, indent=1, allow_nan=False)


def _shared_row(unit: Unit, item: StagePlan) -> list[str]:
    about = duration(item.estimate.seconds) if item.estimate else ""
    fingerprint = short(item.fingerprint) if item.fingerprint else ""
    return [f"{item.state} {unit.label}", STATES[item.state], fingerprint, about]


def _row(member: Member, mine: Mapping[str, StagePlan], stages: Sequence[str]) -> list[str]:
    known = [item.estimate.seconds for item in mine.values() if item.estimate]
    is_partial = any(item.estimate is None and item.state != "=" for item in mine.values())
    return [
        *member.cells,
        *(_state(mine.get(stage)) for stage in stages),
        f"{'at least ' if is_partial else ''}{duration(sum(known))}" if known else "",
    ]


def _state(item: StagePlan | None) -> str:
    return f"{item.state} {STATES[item.state]}" if item else ""
