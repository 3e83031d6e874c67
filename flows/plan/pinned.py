"""Running only a part of the table: an artifact that is given stands for the stage it is of.

A stage whose artifact is given is not built, nor is what only it needs; what comes after it is. The
report needs every stage's artifact, so a run with anything given ends without one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from flows.artifacts.names import open_usable
from flows.identity.manifest import Manifest
from flows.stages import REPORT, STAGES, Stage, stage_named
from infra.storage.base import Store
from nanochat_core.errors import ConfigError


def open_pinned(
    store: Store, names: Iterable[str], *, warn: Callable[[str], None]
) -> dict[str, Manifest]:
    """The artifacts called `names`, by stage. Raises ConfigError for two of one stage."""
    given: dict[str, Manifest] = {}
    for name in names:
        manifest = open_usable(store, name, warn=warn)
        if (other := given.get(manifest.stage)) is not None:
            raise ConfigError(
                f"two artifacts are given for {manifest.stage}: {other.name} and {manifest.name}",
                hint="give one of them with --use",
            )
        if manifest.stage == REPORT.name:
            raise ConfigError(f"{name} is a report, which nothing is made from")
        given[manifest.stage] = manifest
    return given


def stages_with(given: Mapping[str, Manifest]) -> tuple[Stage, ...]:
    """The stages of a run to which these artifacts are given, in the table's order.

    They are the given ones, all that is made from the last of them, and what that needs besides.
    What a given artifact was made from is not built, unless something else needs it.
    """
    if not given:
        return STAGES
    before = {earlier for name in given for earlier in stages_before(stage_named(name))}
    after = set(given) - before  # what is made from these is what the run is for
    for stage in STAGES:  # inputs come before what is made from them
        if stage is not REPORT and stage.name not in before and after & _input_names(stage):
            after.add(stage.name)
    kept = after | set(given)
    for stage in reversed(STAGES):
        if stage.name in kept and stage.name not in given:
            kept |= _input_names(stage)
    return tuple(stage for stage in STAGES if stage.name in kept)


def sections_of(given: Mapping[str, Manifest]) -> frozenset[str]:
    """Return the sections of the configuration that decide what a run builds."""
    built = [stage for stage in stages_with(given) if stage.name not in given]
    return frozenset(section for stage in built for section in stage.config)


def check_stages(stages: Sequence[Stage], given: Mapping[str, Manifest], names: set[str]) -> None:
    """Raise ConfigError for a stage that is to be redone in a run that has none of it."""
    known = {stage.name for stage in stages} - set(given)
    for name in sorted(names - known):
        why = "its artifact is given" if name in given else "nothing in this run needs it"
        raise ConfigError(
            f"stage {name} cannot be redone here: {why}", hint="leave it or a --use out"
        )


def stages_before(stage: Stage) -> set[str]:
    """Everything that the stage is made from, however indirectly."""
    inputs = _input_names(stage)
    return inputs.union(*(stages_before(source) for source in stage.inputs))


def _input_names(stage: Stage) -> set[str]:
    return {source.name for source in stage.inputs}
