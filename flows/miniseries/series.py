"""A miniseries: one profile at several depths, each trained up to its base model's scores.

Whatever does not depend on depth is the same for all: text, tokenizer, rows. So all are evaluated
on the same text, and one law can be fitted to them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flows.artifacts.runs import check_name
from flows.identity.fingerprint import canonical_config, canonical_json
from flows.overrides import default_name
from flows.plan.pinned import stages_before
from flows.plan.upstream import apply_pins
from flows.profiles import Profile, open_profile
from flows.stages import BASE_EVAL, STAGES, Stage
from nanochat_core.errors import ConfigError

LEAST_DEPTHS, MOST_DEPTHS = 2, 12
STAGES_OF_SERIES: tuple[Stage, ...] = tuple(
    stage for stage in STAGES if stage.name in {BASE_EVAL.name, *stages_before(BASE_EVAL)}
)
ADDED = "shards.num_shards="  # key of the override that open_series may add


@dataclass(frozen=True, kw_only=True)
class Member:
    """One depth of a series."""

    depth: int
    name: str  # of its runs: tiny-d4
    profile: Profile
    overrides: tuple[str, ...]  # that reproduce `profile` at this depth

    @property
    def label(self) -> str:
        """The depth as people write it: d4."""
        return f"d{self.depth}"


@dataclass(frozen=True, kw_only=True)
class Series:
    """One profile at several depths, the smallest first."""

    name: str
    profile: str
    members: tuple[Member, ...]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A stage of a series, and the members that share its artifact."""

    stage: Stage
    members: tuple[Member, ...]
    inputs: tuple["Unit", ...]
    is_shared: bool  # by all members of the series

    @property
    def label(self) -> str:
        """The unit's name on pages: tokenizer, d4 / pretrain, d2 d3 / shards."""
        if self.is_shared:
            return self.stage.name
        return f"{' '.join(member.label for member in self.members)} / {self.stage.name}"

    def has(self, depth: int) -> bool:
        """Return whether the member of this depth uses the unit's artifact."""
        return any(member.depth == depth for member in self.members)


def check_depths(depths: Sequence[int]) -> tuple[int, ...]:
    """Return the depths in order. Raises ConfigError unless they are 2 to 12 different ones."""
    if repeated := sorted({depth for depth in depths if depths.count(depth) > 1}):
        raise ConfigError(f"depth {repeated[0]} is given twice", hint="give each depth once")
    if not LEAST_DEPTHS <= len(depths) <= MOST_DEPTHS:
        given = f"{len(depths)} depth{'' if len(depths) == 1 else 's'}"
        raise ConfigError(
            f"{given}, expected {LEAST_DEPTHS} to {MOST_DEPTHS}",
            hint="for example --depths 2,3,4,6; a law with a floor needs 4 or more",
        )
    return tuple(sorted(depths))


def open_series(
    profile: str, depths: Sequence[int], *, overrides: Sequence[str] = (), name: str | None = None
) -> Series:
    """Return the series of `profile` at these depths, all with as much text as the largest needs.

    Raises ConfigError for an unknown profile or setting, or a depth that is out of bounds or
    repeated.
    """
    depths = check_depths(depths)
    # The depth is added to the name of each run: other settings must not take the name tiny-d4.
    name = name or default_name(profile, overrides=overrides)
    check_name(f"{name}-d{depths[-1]}")
    opened = {depth: open_profile(profile, depth=depth, overrides=overrides) for depth in depths}
    extra: tuple[str, ...] = ()
    # A larger model needs more shards. Give all the same number: otherwise tokenizer and rows would
    # differ, and the bits per byte of the depths would be of different text.
    most = max(each.run.shards.num_shards for each in opened.values())
    if any(each.run.shards.num_shards != most for each in opened.values()):
        extra = (f"{ADDED}{most}",)
        opened = {d: open_profile(profile, depth=d, overrides=(*overrides, *extra)) for d in depths}
    return Series(
        name=name,
        profile=profile,
        members=tuple(
            Member(
                depth=depth,
                name=f"{name}-d{depth}",
                profile=opened[depth],
                overrides=(*overrides, *extra),
            )
            for depth in depths
        ),
    )


def pin_members(series: Series, pins: Mapping[str, str]) -> Series:
    """Return the series with upstream names replaced by these pins, the same at every depth."""
    members = (
        replace(m, profile=replace(m.profile, run=apply_pins(m.profile.run, pins)))
        for m in series.members
    )
    return replace(series, members=tuple(members))


def units_of(series: Series, stages: Sequence[Stage] = STAGES_OF_SERIES) -> tuple[Unit, ...]:
    """Return the units to build, inputs first: one of a stage for all members that can share it."""
    found: list[Unit] = []
    of_member: dict[tuple[int, str], Unit] = {}
    for stage in stages:
        alike: dict[tuple[bytes | str, ...], list[Member]] = {}
        for member in series.members:
            # The same settings and the same input units give the same fingerprint. Labels are
            # unique, and hashing the inputs' content would need them to be built.
            settings = canonical_json(canonical_config(stage, member.profile.run))
            inputs = [of_member[member.depth, source.name].label for source in stage.inputs]
            alike.setdefault((settings, *inputs), []).append(member)
        for members in alike.values():
            unit = Unit(
                stage=stage,
                members=tuple(members),
                inputs=tuple(of_member[members[0].depth, s.name] for s in stage.inputs),
                is_shared=len(alike) == 1,
            )
            found.append(unit)
            of_member.update({(member.depth, stage.name): unit for member in members})
    return tuple(found)
