"""Several runs of one profile that differ in settings, and the stages that they share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from flows.identity.fingerprint import canonical_config, canonical_json
from flows.identity.manifest import Manifest
from flows.plan.pinned import stages_before
from flows.plan.upstream import apply_pins
from flows.profiles import Profile
from flows.stages import STAGES, Stage

# By member label: the last artifact of each member that has ended; None: it failed.
Results: TypeAlias = Mapping[str, Manifest | None]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One run of a group."""

    label: str  # as people write it: d4, or p1 s42
    name: str  # of its runs: tiny-d4
    depth: int
    profile: Profile
    overrides: tuple[str, ...]  # that reproduce `profile` at this depth
    cells: tuple[str, ...]  # its first cells in a table


@dataclass(frozen=True, kw_only=True)
class RunGroup:
    """The runs that one flow builds, each up to the stage `stage`."""

    kind: str  # of the flow: miniseries or sweep
    noun: str  # of the members, in the plural: depths
    name: str
    profile: str
    stage: Stage  # the last one of each run
    head: tuple[str, ...]  # above the members' cells
    members: tuple[Member, ...]  # the first ones get the device first

    @property
    def largest(self) -> Member:
        """The member with the largest model; its placement is that of all, as it needs most."""
        return max(self.members, key=lambda member: member.depth)

    @property
    def sections(self) -> frozenset[str]:
        """The sections of the configuration that affect what the group builds."""
        return frozenset(name for stage in stages_to(self.stage) for name in stage.config)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A stage of a group, and the members that share its artifact."""

    stage: Stage
    members: tuple[Member, ...]
    inputs: tuple["Unit", ...]
    label: str  # on pages: tokenizer, d4 / pretrain, s42 / rows

    def has(self, label: str) -> bool:
        """Return whether the member with this label uses the unit's artifact."""
        return any(member.label == label for member in self.members)


def stages_to(last: Stage) -> tuple[Stage, ...]:
    """Return `last` and all stages upstream of it, in the table's order."""
    names = {last.name, *stages_before(last)}
    return tuple(stage for stage in STAGES if stage.name in names)


def pin_members(group: RunGroup, pins: Mapping[str, str]) -> RunGroup:
    """Return the group with upstream names replaced by these pins, the same in every member."""
    members = (
        replace(m, profile=replace(m.profile, run=apply_pins(m.profile.run, pins)))
        for m in group.members
    )
    return replace(group, members=tuple(members))


def units_of(group: RunGroup, stages: Sequence[Stage] | None = None) -> tuple[Unit, ...]:
    """Return the units to build, inputs first: one of a stage for all members that can share it."""
    found: list[Unit] = []
    of_member: dict[tuple[str, str], Unit] = {}
    for stage in stages or stages_to(group.stage):
        alike: dict[tuple[bytes | str, ...], list[Member]] = {}
        for member in group.members:
            # The same settings and the same input units give the same fingerprint. Labels are
            # unique, and hashing the inputs' content would need them to be built.
            settings = canonical_json(canonical_config(stage, member.profile.run))
            inputs = [of_member[member.label, source.name].label for source in stage.inputs]
            alike.setdefault((settings, *inputs), []).append(member)
        for members in alike.values():
            shared = "" if len(alike) == 1 else f"{_label(members, group)} / "
            unit = Unit(
                stage=stage,
                members=tuple(members),
                inputs=tuple(of_member[members[0].label, s.name] for s in stage.inputs),
                label=f"{shared}{stage.name}",
            )
            found.append(unit)
            of_member.update({(member.label, stage.name): unit for member in members})
    return tuple(found)


def _label(members: Sequence[Member], group: RunGroup) -> str:
    """Return the word that these members alone have in common, such as s42; else all labels."""
    for word in members[0].label.split():
        if list(members) == [m for m in group.members if word in m.label.split()]:
            return word
    return ", ".join(member.label for member in members)
