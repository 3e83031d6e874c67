"""The history of a metric over the runs of a name, read from their records and manifests alone.

The runs of a name are those called so or the one a tag points at, and the runs that evaluated what
the name referred to at the time (`nanochat evals`): a tag does not record where it pointed before.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from flows.artifacts.names import check_stage, open_run, suggest
from flows.artifacts.publish import find_manifest
from flows.artifacts.runs import Run, newest_runs, read_all, runs_called
from flows.compare.compare import delta_between, scores_of
from flows.evals.regression import USUAL, Evaluation, same_suite
from flows.evals.suite import history_name
from flows.identity.manifest import Manifest
from flows.render.score import Delta, Score
from flows.stages import EVALUATORS, MODELS
from infra.storage.base import Store
from nanochat_core.errors import ConfigError

MOST_RUNS = 500  # records read, the newest first: each costs a request
_SHOWN = 20  # names in a hint
# Of a run's models the furthest trained first: RL, SFT, midtraining, then the base model.
_BEST_FIRST = tuple(EVALUATORS[model.name].name for model in reversed(MODELS))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One run's evaluation, and its difference from the one before it in time."""

    evaluation: Evaluation
    score: Score
    delta: Delta | None  # None: the one before is of another suite, or does not exist
    is_same: bool  # the artifact is that of the one before: the evaluation was cached


@dataclass(frozen=True, kw_only=True)
class History:
    """The values of one metric of one stage, the latest run first."""

    stage: str
    metric: str
    entries: tuple[Entry, ...]
    more: int  # earlier evaluations that are not among the entries


def read_metric(store: Store, name: str, *, metric: str | None, limit: int) -> History:
    """Read the history of `metric` for `name`: a run's name, a tag, or a stage of one (sft@main).

    Without a stage it is that of the furthest trained chat model that was evaluated, or else of the
    base model; without a metric the first of `USUAL` that was measured. Raises ConfigError if the
    name is unknown or the metric was not measured, ArtifactError if a record or a manifest is
    damaged.
    """
    wanted = _evaluator_of(name)
    runs = _runs_of(store, name)
    found = read_all(lambda run: _evaluations_of(store, run), runs)
    stages = [wanted] if wanted else _BEST_FIRST
    metrics = USUAL if metric is None else (metric,)
    for stage, chosen in ((stage, chosen) for chosen in metrics for stage in stages):
        evaluated = [
            by_stage[stage]
            for by_stage in found
            if stage in by_stage and chosen in scores_of(by_stage[stage].manifest)
        ]
        if evaluated:
            shown = evaluated[: limit + 1]  # the oldest shown needs one more to differ from
            entries = tuple(_entries(store, shown, chosen))[:limit]
            return History(
                stage=stage, metric=chosen, entries=entries, more=len(evaluated) - len(entries)
            )
    raise _nothing(
        name, metric, [e.manifest for by_stage in found for e in by_stage.values()], stages
    )


def _evaluator_of(name: str) -> str | None:
    """Return the evaluation stage for a name with a stage, such as sft@main; None without one."""
    stage, sign, _ = name.partition("@") if "@" in name else name.partition("/")
    if not sign:
        return None
    if check_stage(stage) not in EVALUATORS:
        raise ConfigError(
            f"{stage} makes no model to evaluate", hint=f"stages that do: {', '.join(EVALUATORS)}"
        )
    return EVALUATORS[stage].name


def _runs_of(store: Store, name: str) -> list[Run]:
    """Return every run that `name` refers to or that evaluated it, latest first, each once."""
    of_name = name.partition("@")[2] or name
    own = iter([open_run(store, name)]) if "/" in name else runs_called(store, of_name)
    evaluating = newest_runs(store, history_name(name))
    # A limit for each source, so that nightly evaluations do not crowd out the runs themselves.
    found = {run.run: run for source in (own, evaluating) for run in islice(source, MOST_RUNS)}
    if not found:
        open_run(store, of_name)  # raises an error that lists the names that exist
    return sorted(found.values(), key=lambda run: (run.started, run.run), reverse=True)


def _evaluations_of(store: Store, run: Run) -> dict[str, Evaluation]:
    """Return the run's evaluations by stage, without those that the store has no more."""
    refs = (run.find_ref(stage) for stage in _BEST_FIRST)
    found = ((ref.stage, find_manifest(store, ref)) for ref in refs if ref)
    return {stage: Evaluation(run=run, manifest=manifest) for stage, manifest in found if manifest}


def _entries(store: Store, evaluated: Sequence[Evaluation], metric: str) -> Iterator[Entry]:
    for newer, older in zip(evaluated, [*evaluated[1:], None], strict=True):
        score = scores_of(newer.manifest)[metric]
        delta = None
        if older is not None and same_suite(older.manifest, newer.manifest):
            delta = delta_between(store, older.manifest, newer.manifest, metric)
        same = older is not None and older.manifest.fingerprint == newer.manifest.fingerprint
        yield Entry(evaluation=newer, score=score, delta=delta, is_same=same)


def _nothing(
    name: str, metric: str | None, manifests: Sequence[Manifest], stages: Sequence[str]
) -> ConfigError:
    asked = [manifest for manifest in manifests if manifest.stage in stages]
    if not asked:
        return ConfigError(
            f"no model of {name} was evaluated",
            hint=f"evaluate it now: nanochat evals run {name}",
        )
    known = list(dict.fromkeys(score for manifest in asked for score in scores_of(manifest)))
    is_usual = metric is None or metric in USUAL
    return ConfigError(
        f"no evaluation of {name} measured {metric or ' or '.join(USUAL)}",
        hint=f"one of: {', '.join(known[:_SHOWN])}" if is_usual else suggest(metric or "", known),
    )
