"""A miniseries: one profile at several depths, each trained up to its base model's scores.

Whatever does not depend on depth is the same for all: text, tokenizer, rows. So all are evaluated
on the same text, and one law can be fitted to them.
"""

from collections.abc import Sequence

from flows.artifacts.runs import check_name
from flows.miniseries.findings import HEADER, SIZES, cells_of
from flows.miniseries.points import ADDED, size_of
from flows.overrides import default_name
from flows.profiles import Profile, open_profile
from flows.stages import BASE_EVAL
from flows.sweep.members import Member, RunGroup
from nanochat_core.errors import ConfigError

LEAST_DEPTHS, MOST_DEPTHS = 2, 12


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
) -> RunGroup:
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
    return RunGroup(
        kind="miniseries",
        noun="depths",
        name=name,
        profile=profile,
        stage=BASE_EVAL,
        head=HEADER[:SIZES],
        members=tuple(
            Member(
                label=f"d{depth}",
                name=f"{name}-d{depth}",
                depth=depth,
                profile=opened[depth],
                overrides=(*overrides, *extra),
                cells=_cells(depth, opened[depth]),
            )
            for depth in depths
        ),
    )


def _cells(depth: int, profile: Profile) -> tuple[str, ...]:
    run = profile.run
    return cells_of(depth, size_of(run.model, run.numerics, run.pretrain))
