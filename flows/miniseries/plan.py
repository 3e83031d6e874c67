"""The plan of a series: what would be built, and how long it would take; each stage counts once."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flows.identity.ref import short
from flows.miniseries.findings import HEADER, cells_of
from flows.miniseries.points import size_of
from flows.miniseries.series import Member, Series, Unit, units_of
from flows.plan.plan import STATES, Plan, StagePlan, make_plan
from flows.plan.render import totals
from flows.render.table import columns
from flows.render.text import duration
from infra.placement import Placement
from infra.storage.base import Store

_SIZES = 6  # the first columns of HEADER, which follow from settings without any training


@dataclass(frozen=True, kw_only=True)
class SeriesPlan:
    """The plan of all stages of a series."""

    series: Series
    units: tuple[Unit, ...]  # inputs first
    plan: Plan  # a stage for each unit

    @property
    def items(self) -> Iterator[tuple[Unit, StagePlan]]:
        """The units with their plans."""
        return zip(self.units, self.plan.stages, strict=True)


def plan_series(series: Series, store: Store, work: Path, placement: Placement) -> SeriesPlan:
    """Plan every depth. Raises what `flows.plan.plan.make_plan` raises."""
    plans = {
        member.depth: make_plan(member.profile.run, store, work, placement=placement)
        for member in series.members
    }
    units = units_of(series)
    # A unit has the same settings and inputs for all its members: any one's plan will do.
    items = tuple(plans[unit.members[0].depth].of(unit.stage.name) for unit in units)
    return SeriesPlan(series=series, units=units, plan=Plan(store=store.url, stages=items))


def lines_of(planned: SeriesPlan) -> list[str]:
    """Return the plan for people: shared stages, a table of the depths, and the sum."""
    # Stages of one depth alone are in the table; those that several share stand above it.
    alone = [(unit, item) for unit, item in planned.items if len(unit.members) == 1]
    several = [(unit, item) for unit, item in planned.items if len(unit.members) > 1]
    stages = list(dict.fromkeys(unit.stage.name for unit, _ in alone))
    table = [[*HEADER[:_SIZES], *stages, "about"]]
    for member in planned.series.members:
        mine = {unit.stage.name: item for unit, item in alone if unit.members == (member,)}
        table.append(_row(member, mine, stages))
    return [
        *columns([_shared_row(unit, item) for unit, item in several]),
        "",
        *columns(table, right=range(1, _SIZES)),
        "",
        totals(planned.plan)["summary"],
    ]


def plan_to_json(planned: SeriesPlan) -> str:
    """Return the plan as JSON, for programs."""
    tree = {
        "format": 1,
        "name": planned.series.name,
        "profile": planned.series.profile,
        "store": planned.plan.store,
        **totals(planned.plan),
        "stages": [
            {
                "stage": unit.stage.name,
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
    run = member.profile.run
    known = [item.estimate.seconds for item in mine.values() if item.estimate]
    return [
        *cells_of(member.depth, size_of(run.model, run.numerics, run.pretrain)),
        *(_state(mine.get(stage)) for stage in stages),
        duration(sum(known)) if known else "",
    ]


def _state(item: StagePlan | None) -> str:
    return f"{item.state} {STATES[item.state]}" if item else ""
