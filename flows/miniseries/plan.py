"""The plan of a series: what would be built, and how long it would take; each stage counts once."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flows.identity.fingerprint import short
from flows.miniseries.findings import HEADER, cells_of
from flows.miniseries.points import size_of
from flows.miniseries.series import Member, Series, Unit, units_of
from flows.plan.plan import STATES, StagePlan, make_plan
from flows.render.table import columns
from flows.render.text import duration
from infra.placement import Placement
from infra.storage.base import Store

_SIZES = 6  # the first columns of HEADER, which follow from settings without any training


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """The plan of one stage of the series."""

    unit: Unit
    item: StagePlan


@dataclass(frozen=True, kw_only=True)
class SeriesPlan:
    """The plan of all stages of a series."""

    series: Series
    store: str
    units: tuple[UnitPlan, ...]  # inputs first

    @property
    def seconds(self) -> float:
        """The sum of the stages' estimates, without those that have none."""
        # A sum is the time it takes where one device builds one stage after the other.
        return sum(p.item.estimate.seconds for p in self.units if p.item.estimate)

    @property
    def dollars(self) -> float:
        """The sum of the stages' estimated costs, without those that have none."""
        return sum(p.item.estimate.dollars for p in self.units if p.item.estimate)

    @property
    def unknown(self) -> int:
        """The number of stages to build that have no estimate, since they never ran."""
        return sum(p.item.state != "=" and p.item.estimate is None for p in self.units)

    @property
    def is_done(self) -> bool:
        """True if every stage is up to date."""
        return all(p.item.state == "=" for p in self.units)


def plan_series(series: Series, store: Store, work: Path, placement: Placement) -> SeriesPlan:
    """Plan every depth. Raises what `flows.plan.plan.make_plan` raises."""
    plans = {
        member.depth: make_plan(member.profile.run, store, work, placement=placement)
        for member in series.members
    }
    return SeriesPlan(
        series=series,
        store=store.url,
        units=tuple(
            # A unit has the same settings and inputs for all its members: any one's plan will do.
            UnitPlan(unit=unit, item=plans[unit.members[0].depth].of(unit.stage.name))
            for unit in units_of(series)
        ),
    )


def lines_of(planned: SeriesPlan) -> list[str]:
    """Return the plan for people: shared stages, a table of the depths, and the sum."""
    alone = [p for p in planned.units if len(p.unit.members) == 1]
    several = [p for p in planned.units if len(p.unit.members) > 1]
    stages = list(dict.fromkeys(p.unit.stage.name for p in alone))
    table = [[*HEADER[:_SIZES], *stages, "about"]]
    table += [_row(member, alone, stages) for member in planned.series.members]
    return [
        *columns([_shared_row(p) for p in several]),
        "",
        *columns(table, right=range(1, _SIZES)),
        "",
        summary(planned),
    ]


def summary(planned: SeriesPlan) -> str:
    """Return the number of stages to build, with time and cost, in one line."""
    total = len(planned.units)
    if planned.is_done:
        return f"nothing to run: {total} stages up to date"
    count = sum(p.item.state != "=" for p in planned.units)
    text = f"{count} of {total} stages to build"
    if planned.seconds:
        text += f"; about {duration(planned.seconds)}, ${planned.dollars:.2f}"
        text += f" without {planned.unknown} stages that never ran" if planned.unknown else ""
    return text


def plan_to_json(planned: SeriesPlan) -> str:
    """Return the plan as JSON, for programs."""
    tree = {
        "format": 1,
        "name": planned.series.name,
        "profile": planned.series.profile,
        "store": planned.store,
        "summary": summary(planned),
        "seconds": planned.seconds,
        "dollars": planned.dollars,
        "without_estimate": planned.unknown,
        "stages": [
            {
                "stage": p.unit.stage.name,
                "depths": [member.depth for member in p.unit.members],
                "state": p.item.state,
                "fingerprint": p.item.fingerprint,
                "estimate": asdict(p.item.estimate) if p.item.estimate else None,
            }
            for p in planned.units
        ],
    }
    return json.dumps(tree, indent=1, allow_nan=False)


def _shared_row(planned: UnitPlan) -> list[str]:
    item = planned.item
    about = duration(item.estimate.seconds) if item.estimate else ""
    fingerprint = short(item.fingerprint) if item.fingerprint else ""
    return [f"{item.state} {planned.unit.label}", STATES[item.state], fingerprint, about]


def _row(member: Member, alone: Sequence[UnitPlan], stages: Sequence[str]) -> list[str]:
    run = member.profile.run
    # Stages of this depth alone: those that several share are listed above the table.
    mine = {p.unit.stage.name: p.item for p in alone if p.unit.members == (member,)}
    known = [item.estimate.seconds for item in mine.values() if item.estimate]
    return [
        *cells_of(member.depth, size_of(run.model, run.numerics, run.pretrain)),
        *(_state(mine.get(stage)) for stage in stages),
        duration(sum(known)) if known else "",
    ]


def _state(item: StagePlan | None) -> str:
    return f"{item.state} {STATES[item.state]}" if item else ""
