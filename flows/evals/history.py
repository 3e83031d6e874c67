"""How a number went over the runs that a name stood for: from their records and manifests alone.

Those runs are the ones called so, or the one that a tag points at; and those that judged what the
name stood for at the time (`nanochat evals`), since a tag forgets where it pointed before.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from flows.artifacts.names import MODELS, check_stage, open_run, suggest
from flows.artifacts.publish import find_manifest
from flows.artifacts.runs import Run, newest_runs, read_all, runs_called
from flows.compare.compare import Answers, Delta, Score, answers_of, delta_of, scores_of
from flows.evals.regression import Evaluation, same_suite
from flows.evals.suite import history_name
from flows.identity.manifest import Manifest
from flows.stages import BASE_EVAL, CHAT_EVALS
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, ConfigError

USUAL = ("chatcore", "core", "val_bpb")  # of which the first that was measured is shown
MOST_RUNS = 500  # that are looked at
_SHOWN = 20  # names in a hint
_JUDGES = {stage.inputs[0].name: stage.name for stage in (BASE_EVAL, *CHAT_EVALS)}
_BEST_FIRST = (*(stage.name for stage in reversed(CHAT_EVALS)), BASE_EVAL.name)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One run's evaluation, and how far it is from the one before it in time."""

    run: Run
    manifest: Manifest  # of the stage that judged
    score: Score
    delta: Delta | None  # None: nothing earlier compares
    is_same: bool  # it is the very artifact of the one before: nothing had to be judged

    @property
    def model(self) -> str:
        """The fingerprint of the model, or "" where the record does not tell."""
        return Evaluation(run=self.run, manifest=self.manifest).model


@dataclass(frozen=True, kw_only=True)
class History:
    """A number of one stage's, the latest run first."""

    stage: str
    metric: str
    entries: tuple[Entry, ...]
    more: int  # earlier evaluations that are not among the entries


def read_metric(store: Store, name: str, *, metric: str | None, limit: int) -> History:
    """How `metric` went for what `name` calls: a run's name, a tag, or a stage of one (sft@main).

    Without a stage it is that of the furthest trained chat model that was judged, or else of the
    base model; without a metric the first of `USUAL` that was measured. Raises ConfigError for a
    name that stands for nothing or a number that nobody measured, ArtifactError for a record or a
    manifest that is damaged.
    """
    wanted = _judge_of(name)
    runs = _runs_of(store, name)
    found = [by_stage for by_stage in read_all(lambda run: _judged(store, run), runs) if by_stage]
    stages = [wanted] if wanted else _BEST_FIRST
    metrics = USUAL if metric is None else (metric,)
    for stage, chosen in ((stage, chosen) for chosen in metrics for stage in stages):
        judged = [
            Evaluation(run=run, manifest=by_stage[stage])
            for run, by_stage in found
            if stage in by_stage and chosen in scores_of(by_stage[stage])
        ]
        if judged:
            shown = judged[: limit + 1]  # one more to tell the difference from
            entries = tuple(_entries(store, shown, chosen))[:limit]
            return History(
                stage=stage, metric=chosen, entries=entries, more=len(judged) - len(entries)
            )
    raise _nothing(name, metric, [m for _, by_stage in found for m in by_stage.values()], stages)


def _judge_of(name: str) -> str | None:
    """The stage that judges the model which `name` has a stage of; None: it names none."""
    stage, sign, _ = name.partition("@") if "@" in name else name.partition("/")
    if not sign:
        return None
    if check_stage(stage) not in MODELS:
        raise ConfigError(
            f"{stage} makes no model that is judged", hint=f"stages that do: {', '.join(MODELS)}"
        )
    return _JUDGES[stage]


def _runs_of(store: Store, name: str) -> list[Run]:
    """Every run that `name` stands for or that judged it, latest first, each once."""
    of_name = name.partition("@")[2] or name
    own = iter([open_run(store, name)]) if "/" in name else runs_called(store, of_name)
    judging = newest_runs(store, history_name(name))
    found = {run.run: run for source in (own, judging) for run in islice(source, MOST_RUNS)}
    if not found:
        open_run(store, of_name)  # it raises, and says what there is instead
    return sorted(found.values(), key=lambda run: (run.started, run.run), reverse=True)


def _judged(store: Store, run: Run) -> tuple[Run, dict[str, Manifest]] | None:
    """The evaluations that a run has; None when there are none left."""
    found: dict[str, Manifest] = {}
    for stage in _BEST_FIRST:
        fingerprint = run.stages.get(stage)
        if fingerprint and (manifest := find_manifest(store, stage, fingerprint)):
            found[stage] = manifest
    return (run, found) if found else None


def _entries(store: Store, judged: Sequence[Evaluation], metric: str) -> Iterator[Entry]:
    for newer, older in zip(judged, [*judged[1:], None], strict=True):
        score = scores_of(newer.manifest)[metric]
        delta = None
        same = older is not None and older.manifest.fingerprint == newer.manifest.fingerprint
        if older is not None and same_suite(older.manifest, newer.manifest):
            old = scores_of(older.manifest)[metric]
            pair = None if same else _pairs(store, older.manifest, newer.manifest).get(metric)
            delta = Delta(value=0.0) if same else delta_of(old, score, pair)
        yield Entry(run=newer.run, manifest=newer.manifest, score=score, delta=delta, is_same=same)


def _pairs(store: Store, old: Manifest, new: Manifest) -> Mapping[str, Answers]:
    """By task, the questions that both answered; none where their records are gone."""
    with tempfile.TemporaryDirectory(prefix="evals-") as room:
        try:
            return answers_of(store, [old, new], Path(room))[0]
        except ArtifactError:  # the scores stand; their difference gets the wider interval
            return {}


def _nothing(
    name: str, metric: str | None, manifests: Sequence[Manifest], stages: Sequence[str]
) -> ConfigError:
    asked = [manifest for manifest in manifests if manifest.stage in stages]
    if not asked:
        return ConfigError(
            f"nothing that {name} stands for was judged",
            hint=f"judge it now: nanochat evals run {name}",
        )
    known = list(dict.fromkeys(score for manifest in asked for score in scores_of(manifest)))
    is_usual = metric is None or metric in USUAL
    return ConfigError(
        f"nobody has measured {metric or ' or '.join(USUAL)} of {name}",
        hint=f"one of: {', '.join(known[:_SHOWN])}" if is_usual else suggest(metric or "", known),
    )
