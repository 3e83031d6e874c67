"""The measurements of a series' models, read from the manifests in the store."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from flows.artifacts.publish import find_manifest
from flows.artifacts.runs import Run, known_names, newest_runs
from flows.compare.compare import scores_of
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from flows.render.score import Score
from flows.stages import BASE_EVAL, PRETRAIN
from infra.storage.base import Store
from nanochat_core.config import ModelConfig, NumericsConfig, PretrainConfig
from nanochat_core.errors import ArtifactError, ConfigError
from nanochat_core.scaling import (
    flops_per_token,
    num_lm_head_params,
    num_matrix_params,
    num_params,
    num_scaling_params,
)

ADDED = "shards.num_shards="  # key of the override that a series may add


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a model and the amount of its training, computed from its settings."""

    parameters: int  # all, embeddings included
    matrix_parameters: int  # inside the blocks
    lm_head_parameters: int
    scaling_parameters: int  # matrices and lm_head: what training tokens are counted against
    tokens: int  # trained on
    flops: float  # of training


@dataclass(frozen=True, kw_only=True)
class Point:
    """One trained and evaluated model of a series."""

    depth: int
    run: str  # id of the run that built or reused it
    pretrain: str  # fingerprint, 64 hex digits
    base_eval: str  # fingerprint, 64 hex digits
    text: str | None  # digest of the rows it was evaluated on
    size: Size
    seconds: float  # of training, summed over executions; depends on the machine
    val_bpb: Score
    core: Score | None  # None: CORE was not measured


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A depth without a point."""

    depth: int
    why: str


def size_of(model: ModelConfig, constants: NumericsConfig, pretrain: PretrainConfig) -> Size:
    """Return the size of the model that these settings train."""
    tokens = pretrain.num_steps * pretrain.total_batch_size
    return Size(
        parameters=num_params(model, constants),
        matrix_parameters=num_matrix_params(model, constants),
        lm_head_parameters=num_lm_head_params(model),
        scaling_parameters=num_scaling_params(model, constants),
        tokens=tokens,
        flops=float(flops_per_token(model, constants)) * tokens,
    )


def depths_in(store: Store, name: str) -> list[int]:
    """Return the depths at which the store has a run of the series called `name`."""
    found = (re.fullmatch(rf"{re.escape(name)}-d(\d+)", each) for each in known_names(store))
    return sorted({int(match[1]) for match in found if match})


def runs_of(
    store: Store, name: str, depths: Sequence[int], *, overrides: Sequence[str] | None = None
) -> dict[int, Run | Missing]:
    """Return for each depth the newest run that was evaluated with the same settings.

    These are `overrides`, in any order, to which a series may have added the number of shards.
    Without them they are the overrides of the newest evaluated run of any depth.
    """
    added = ADDED
    evaluated = {
        depth: [run for run in newest_runs(store, f"{name}-d{depth}") if _is_evaluated(run)]
        for depth in depths
    }
    if overrides is None:
        newest = max(
            (runs[0] for runs in evaluated.values() if runs), key=lambda r: r.started, default=None
        )
        overrides = newest.overrides if newest else ()
        added = ""  # a run's own overrides include what its series added: match them exactly
    found: dict[int, Run | Missing] = {}
    for depth, runs in evaluated.items():
        # The newest first, so alike[0] is the newest with these settings.
        alike = [run for run in runs if _has(run, overrides, added)]
        if runs:
            settings = ", ".join(runs[0].overrides) or "the profile's own"
            why = f"it was trained with other settings only: {settings}"
        else:
            why = _why_missing(next(newest_runs(store, f"{name}-d{depth}"), None))
        found[depth] = alike[0] if alike else Missing(depth=depth, why=why)
    return found


def _why_missing(run: Run | None) -> str:
    return "it failed" if run is not None and run.status == "failed" else "it was not evaluated"


def _is_evaluated(run: Run) -> bool:
    return {PRETRAIN.name, BASE_EVAL.name} <= run.stages.keys()


def _has(run: Run, overrides: Sequence[str], added: str) -> bool:
    """Return whether the run has these overrides, and none besides but those of key `added`."""
    more = [text for text in run.overrides if text not in overrides]
    return set(overrides) <= set(run.overrides) and all(
        added and text.startswith(added) for text in more
    )


def read_point(store: Store, run: Run, depth: int) -> Point | Missing:
    """Read the point that a run measured; Missing if its artifacts are gone or unreadable."""
    if not _is_evaluated(run):
        return Missing(depth=depth, why=_why_missing(run))
    try:
        trained, evaluated = (_open(store, run, stage) for stage in (PRETRAIN.name, BASE_EVAL.name))
        return _point(run, depth, trained, evaluated)
    except (ArtifactError, ConfigError, KeyError, TypeError) as error:
        # Settings of another version of the code lack keys, or have unknown ones.
        text = str(error) if isinstance(error, ArtifactError) else "settings of another version"
        return Missing(depth=depth, why=text)


def notes_on(points: Sequence[Point]) -> Iterator[str]:
    """Yield a sentence for each thing that makes the points hard to compare."""
    first = points[0] if points else None
    for point in points[1:]:
        if first is not None and point.text != first.text:
            yield (
                f"d{point.depth} was evaluated on other text than d{first.depth}: their bits per "
                "byte do not compare"
            )
    ratios = [point.size.tokens / point.size.scaling_parameters for point in points]
    # 10 % of tolerance: training ends at whole steps, so equal ratios come out a little unequal.
    if ratios and max(ratios) > 1.1 * min(ratios):
        yield (
            f"tokens per parameter go from {max(ratios):.3g} to {min(ratios):.3g}: a law of this "
            "series is not one of models that are each trained in proportion to their size"
        )


def _open(store: Store, run: Run, stage: str) -> Manifest:
    manifest = find_manifest(store, ArtifactRef(stage, run.stages[stage]))
    if manifest is None:
        raise ArtifactError(f"{stage} of {run.run} is no longer in the store")
    return manifest


def _point(run: Run, depth: int, trained: Manifest, evaluated: Manifest) -> Point:
    # From the fingerprint's preimage: the settings it was trained with, whatever the profile is
    # today.
    config = cast("dict[str, Any]", trained.preimage["config"])
    rows = evaluated.inputs.get("rows")
    scores = scores_of(evaluated)
    if "val_bpb" not in scores:
        raise ArtifactError(f"{evaluated.name} has no val_bpb")
    return Point(
        depth=depth,
        run=run.run,
        pretrain=trained.fingerprint,
        base_eval=evaluated.fingerprint,
        text=rows.digest if rows else None,
        size=size_of(
            ModelConfig.from_tree(config["model"]),
            NumericsConfig.from_tree(config["numerics"]),
            PretrainConfig.from_tree(config["pretrain"]),
        ),
        seconds=sum(s["ended"] - s["started"] for s in trained.provenance.segments),
        val_bpb=scores["val_bpb"],
        core=scores.get("core"),
    )
