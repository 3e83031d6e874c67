"""Pinned inputs (--use): run a part of the pipeline from artifacts that exist.

A stage whose artifact is given is not built, nor are stages that only it needs; the stages after it
are. The report needs every stage's artifact, so a run with a pinned input has no report.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from flows.identity.manifest import Manifest
from flows.stages import REPORT, STAGES, Stage, stage_named
from infra.storage.base import Store
from nanochat_core.errors import ConfigError


def open_pinned(
    store: Store, names: Iterable[str], *, warn: Callable[[str], None]
) -> dict[str, Manifest]:
    """Open the artifacts named `names`, by stage. Raises ConfigError for two of one stage."""
    pinned: dict[str, Manifest] = {}
    for name in names:
        # Imported here: most plans have no such input.
        from flows.artifacts.names import open_usable

        manifest = open_usable(store, name, warn=warn)
        if (other := pinned.get(manifest.stage)) is not None:
            raise ConfigError(
                f"two artifacts are given for {manifest.stage}: {other.name} and {manifest.name}",
                hint="give one of them with --use",
            )
        # The report is the last stage: a run that starts from it would have nothing to build.
        if manifest.stage == REPORT.name:
            raise ConfigError(f"{name} is a report, which nothing is made from")
        pinned[manifest.stage] = manifest
    return pinned


def stages_with(pinned: Mapping[str, Manifest]) -> tuple[Stage, ...]:
    """Return the stages of a run with these pinned inputs, in the table's order.

    They are the given stages, all stages downstream of the last of them, and the other inputs that
    those need. What a given artifact was made from is not built unless something else needs it.
    """
    if not pinned:
        return STAGES
    before = {earlier for name in pinned for earlier in stages_before(stage_named(name))}
    # Given rows and pretrain, rows is only an input: the run is for what follows pretrain.
    after = set(pinned) - before
    for stage in STAGES:  # inputs come before the stages that read them, so one pass is enough
        if stage is not REPORT and stage.name not in before and after & _input_names(stage):
            after.add(stage.name)
    needed = after | set(pinned)
    for stage in reversed(STAGES):
        if stage.name in needed and stage.name not in pinned:
            needed |= _input_names(stage)
    return tuple(stage for stage in STAGES if stage.name in needed)


def sections_of(pinned: Mapping[str, Manifest]) -> frozenset[str]:
    """Return the sections of the configuration that affect what a run builds."""
    built = [stage for stage in stages_with(pinned) if stage.name not in pinned]
    return frozenset(section for stage in built for section in stage.config)


def check_stages(stages: Sequence[Stage], pinned: Mapping[str, Manifest], names: set[str]) -> None:
    """Raise ConfigError if a stage to redo is not built by this run."""
    known = {stage.name for stage in stages} - set(pinned)
    for name in sorted(names - known):
        why = "its artifact is given" if name in pinned else "nothing in this run needs it"
        raise ConfigError(
            f"stage {name} cannot be redone here: {why}",
            hint=f"leave out --use, or {name} in --force and --from-stage",
        )


def stages_before(stage: Stage) -> set[str]:
    """Return the names of all stages upstream of `stage`."""
    inputs = _input_names(stage)
    return inputs.union(*(stages_before(source) for source in stage.inputs))


def _input_names(stage: Stage) -> set[str]:
    return {source.name for source in stage.inputs}
