"""Run a part of the pipeline: from artifacts that exist (--use), to a last stage (--until).

A stage whose artifact is given is not built, nor are stages that only it needs; the stages after it
are. The report needs every stage's artifact, so a run with a pinned input has no report.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from flows.artifacts.names import check_stage, open_usable
from flows.identity.manifest import Manifest
from flows.stages import EVALUATORS, REPORT, STAGES, Stage, stage_named, stages_to_redo
from infra.storage.base import Store
from nanochat_core.eras import HEAD, JANUARY_5
from nanochat_core.errors import ConfigError


def open_pinned(
    store: Store, names: Iterable[str], *, warn: Callable[[str], None]
) -> dict[str, Manifest]:
    """Open the artifacts named `names`, by stage. Raises ConfigError for two of one stage."""
    pinned: dict[str, Manifest] = {}
    for name in names:
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


def stages_with(pinned: Mapping[str, Manifest], *, until: str | None = None) -> tuple[Stage, ...]:
    """Return the stages of a run with these pinned inputs, in the table's order.

    They are the given stages, all stages downstream of the last of them or only the stage `until`,
    and the other inputs that those need. What a given artifact was made from is not built unless
    something else needs it. Raises ConfigError if `until` needs none of the given artifacts.
    """
    if until is not None:
        check_stage(until)
    elif not pinned:
        return STAGES
    needed = _after(pinned) if until is None else {until}
    for stage in reversed(STAGES):
        if stage.name in needed and stage.name not in pinned:
            needed |= _input_names(stage)
    if until is not None:
        _check_until(until, pinned, needed)
    return tuple(stage for stage in STAGES if stage.name in needed)


def _after(pinned: Mapping[str, Manifest]) -> set[str]:
    """Return the names of the given stages, and of those downstream of the last of them."""
    before = {earlier for name in pinned for earlier in stages_before(stage_named(name))}
    # Given rows and pretrain, rows is only an input: the run is for what follows pretrain.
    stages = [stage for stage in STAGES if stage is not REPORT and stage.name not in before]
    last = set(pinned) - before
    after = (stages_to_redo(stages, force=(), from_stage=name) for name in last)
    return set(pinned).union(*after)


def _check_until(until: str, pinned: Mapping[str, Manifest], needed: set[str]) -> None:
    if pinned and until == REPORT.name:
        raise ConfigError(
            f"with --use a run has no {until}, which needs the artifact of every stage",
            hint="leave out --until or --use",
        )
    if useless := [m.name for name, m in pinned.items() if name == until or name not in needed]:
        raise ConfigError(
            f"a run until {until} does not need {useless[0]}",
            hint="leave it out of --use, or name a later stage with --until",
        )


def sections_of(pinned: Mapping[str, Manifest], *, until: str | None = None) -> frozenset[str]:
    """Return the sections of the configuration that affect what a run builds."""
    return frozenset(
        section
        for stage in stages_with(pinned, until=until)
        if stage.name not in pinned
        for section in stage.config
    )


def check_stages(stages: Sequence[Stage], pinned: Mapping[str, Manifest], names: set[str]) -> None:
    """Raise ConfigError if a stage to redo is not built by this run."""
    known = {stage.name for stage in stages} - set(pinned)
    for name in sorted(names - known):
        why = "its artifact is given" if name in pinned else "nothing in this run needs it"
        raise ConfigError(
            f"stage {name} cannot be redone here: {why}",
            hint=f"leave out --use and --until, or {name} in --force and --from-stage",
        )


def check_trained(stages: Iterable[Stage], pinned: Mapping[str, Manifest]) -> None:
    """Raise ConfigError if a stage would train an imported model of an era that is only read."""
    for stage in stages:
        given = pinned.get(stage.inputs[0].name) if stage.inputs else None
        if given is None or stage.model is None or stage.name in pinned:
            continue
        if given.architecture is not None:
            raise ConfigError(
                f"{stage.name} cannot train {given.name}, a model of {given.architecture!a}",
                hint="nanochat evals can evaluate it; models of nanochat's are trained",
            )
        era = given.provenance.metrics.get("era", HEAD)  # only an imported model has one
        if era not in (JANUARY_5.first_day, HEAD):
            raise ConfigError(
                f"{stage.name} cannot train {given.name}, a model of nanochat's era {era}",
                hint=f"evaluate it (--until {EVALUATORS[given.stage].name}), chat with it or "
                f"export it; models of {JANUARY_5.first_day} or of since {HEAD} are trained",
            )


def stages_before(stage: Stage) -> set[str]:
    """Return the names of all stages upstream of `stage`."""
    inputs = _input_names(stage)
    return inputs.union(*(stages_before(source) for source in stage.inputs))


def _input_names(stage: Stage) -> set[str]:
    return {source.name for source in stage.inputs}
