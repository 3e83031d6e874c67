"""The plan of a sweep: its stages, what would be built, and how long it would take.

A stage that several runs share is one unit and counts once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from flows.identity.fingerprint import canonical_config, canonical_json
from flows.identity.manifest import Manifest
from flows.plan.pinned import stages_with
from flows.plan.plan import Plan, make_plan
from flows.plan.planned import plan_run
from flows.plan.render import table, to_tree, totals
from flows.plan.upstream import Log, Pins, apply_pins
from flows.render.table import Table, numbers, texts
from flows.stages import Stage
from flows.sweep.grid import Member, Sweep
from flows.sweep.request import SweepRequest
from infra.placement import Placement
from infra.storage.base import Store

# By member label: the last artifact of each member that has ended; None: it failed.
Results: TypeAlias = Mapping[str, Manifest | None]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A stage of a sweep, and the members that share its artifact."""

    stage: Stage
    members: tuple[Member, ...]
    inputs: tuple["Unit", ...]
    label: str  # on pages: tokenizer, d4 / pretrain, s42 / rows

    def has(self, label: str) -> bool:
        """Return whether the member with this label uses the unit's artifact."""
        return any(member.label == label for member in self.members)


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A requested sweep, opened and planned."""

    sweep: Sweep  # its moving upstream names are resolved
    pins: Pins  # what they stand for
    store: Store
    placement: Placement  # of all members
    units: tuple[Unit, ...]  # inputs first
    plan: Plan  # a stage for each unit

    @property
    def request(self) -> SweepRequest:
        """The request."""
        return self.sweep.request


def units_of(sweep: Sweep, stages: Sequence[Stage] | None = None) -> tuple[Unit, ...]:
    """Return the units to build, inputs first: one of a stage for all members that can share it."""
    found: list[Unit] = []
    of_member: dict[tuple[str, str], Unit] = {}
    for stage in stages or stages_with({}, until=sweep.request.stage):
        alike: dict[tuple[bytes | str, ...], list[Member]] = {}
        for member in sweep.members:
            # The same settings and the same input units give the same fingerprint. Labels are
            # unique, and hashing the inputs' content would need them to be built.
            settings = canonical_json(canonical_config(stage, member.profile.run))
            inputs = [of_member[member.label, source.name].label for source in stage.inputs]
            alike.setdefault((settings, *inputs), []).append(member)
        for members in alike.values():
            shared = "" if len(alike) == 1 else f"{_label(members, sweep)} / "
            unit = Unit(
                stage=stage,
                members=tuple(members),
                inputs=tuple(of_member[members[0].label, s.name] for s in stage.inputs),
                label=f"{shared}{stage.name}",
            )
            found.append(unit)
            of_member.update({(member.label, stage.name): unit for member in members})
    return tuple(found)


def _label(members: Sequence[Member], sweep: Sweep) -> str:
    """Return the word that these members alone have in common, such as s42; else all labels."""
    for word in members[0].label.split():
        if list(members) == [m for m in sweep.members if word in m.label.split()]:
            return word
    return ", ".join(member.label for member in members)


def plan_sweep(
    sweep: Sweep,
    store: Store,
    home: Path,
    *,
    log: Log,
    known: Mapping[str, str] | None = None,
    will_run: bool = True,
) -> SweepPlan:
    """Plan every member. The arguments, and what it raises, are as for `plan_run`."""
    # One placement for all members, that of the largest model, which fills the most GPUs, and one
    # resolution of names, since one that moves in between must not give members other data.
    first = plan_run(sweep.largest.request, store, home, log=log, known=known, will_run=will_run)
    members = (
        replace(m, profile=replace(m.profile, run=apply_pins(m.profile.run, first.pins)))
        for m in sweep.members
    )
    sweep, until = replace(sweep, members=tuple(members)), sweep.request.stage
    plans = {
        m.label: make_plan(
            m.profile.run, store, home / "work", until=until, placement=first.placement
        )
        for m in sweep.members
    }
    units = units_of(sweep)
    # A unit has the same settings and inputs for all its members: any one's plan will do.
    items = tuple(plans[unit.members[0].label].of(unit.stage.name) for unit in units)
    return SweepPlan(
        sweep=sweep,
        pins=first.pins,
        store=store,
        placement=first.placement,
        units=units,
        plan=Plan(store=store.url, stages=items),
    )


def lines_of(planned: SweepPlan) -> list[str | Table]:
    """Return the plan for people: the points, the stages by what shares them, and the sum."""
    first, *others = planned.sweep.head
    rows = [point.cells for point in planned.sweep.points]
    points = Table(columns=(*texts(first), *numbers(*others)), rows=rows)
    return [points, "", stages_of(planned), "", totals(planned.plan)["summary"]]


def stages_of(planned: SweepPlan) -> Table:
    """Return a row for each unit."""
    labels = (unit.label for unit in planned.units)
    return table(zip(planned.plan.stages, labels, strict=True))


def plan_tree(planned: SweepPlan) -> dict[str, Any]:
    """Return the plan as JSON values, for programs."""
    tree = to_tree(planned.plan)
    for unit, stage in zip(planned.units, tree["stages"], strict=True):
        stage["members"] = [member.label for member in unit.members]
        stage["depths"] = [member.depth for member in unit.members]
    return {"name": planned.sweep.name, "profile": planned.request.profile, **tree}
