"""Whether a model got worse: its newest evaluation against the earlier ones of the same name.

Only evaluations of the same suite compare: the same stage with the same settings and data, and
nothing but the model another. A model that did not change has the very same evaluation, so against
the `previous` one a loss is told once, on the day it comes; against the `best` one, every time
until it is made good.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from flows.artifacts.names import MODELS
from flows.artifacts.publish import find_manifest
from flows.artifacts.runs import Run, newest_runs
from flows.compare.compare import Answers, Delta, Score, answers_of, delta_of, scores_of
from flows.evals.suite import Against, Rule
from flows.identity.fingerprint import short
from flows.identity.manifest import Manifest
from flows.render.terminal import number
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, ConfigError

_MAIN = ("chatcore", "core", "val_bpb")  # of which the first that was measured is looked at
_LESS_IS_BETTER = ("bpb", "loss")  # as a name ends
_HISTORY = 200  # evaluations that are looked back on
_SHOWN_NAMES = 12


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One run's judgement of a model."""

    run: Run
    manifest: Manifest  # of the stage that judged

    @property
    def model(self) -> str:
        """The fingerprint of the model, or "" where the record does not tell."""
        return next((i.fingerprint for n, i in self.manifest.inputs.items() if n in MODELS), "")


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """What became of a metric."""

    metric: str
    score: Score
    baseline: Score | None  # None: no earlier evaluation compares
    baseline_run: str | None
    delta: Delta | None  # from the baseline
    drop: float  # that was allowed
    regressed: bool

    @property
    def is_inside(self) -> bool:
        """Whether the difference lies inside its 95 % interval: other questions could undo it."""
        if self.delta is None or self.delta.low is None or self.delta.value == 0:
            return False
        return not self.delta.is_clear

    @property
    def text(self) -> str:
        """One line for people."""
        shown = f"{self.metric} {_shown(self.score)}"
        if self.baseline is None or self.delta is None:
            return f"{shown}; there is no earlier evaluation to compare it with"
        if self.delta.value == 0:
            return f"{shown}, as in run {self.baseline_run}"
        text = f"{shown}, {self.delta.value:+.4g} against {number(self.baseline.value)} of run "
        text += f"{self.baseline_run}"
        if self.regressed:
            text += f": worse by more than {number(self.drop)}"
        return text + ("; inside the 95 % interval of the difference" if self.is_inside else "")

    @property
    def facts(self) -> dict[str, Any]:
        """The same for programs."""
        baseline, delta = self.baseline, self.delta
        return {
            "metric": self.metric,
            "value": self.score.value,
            "interval": [self.score.low, self.score.high],
            "baseline": baseline and baseline.value,
            "baseline_interval": baseline and [baseline.low, baseline.high],
            "baseline_run": self.baseline_run,
            "delta": delta and delta.value,
            "delta_interval": delta and [delta.low, delta.high],
            "inside_interval": self.is_inside,
            "drop": self.drop,
            "regressed": self.regressed,
            "text": self.text,
        }


def read_history(store: Store, name: str, stage: str) -> list[Evaluation]:
    """What finished runs called `name` found in `stage`, latest first; damaged ones are left out.

    The name is a run's, not a tag's: see `flows.evals.suite.history_name`.
    """
    found: list[Evaluation] = []
    known: dict[str, Manifest | None] = {}
    for run in islice(newest_runs(store, name), _HISTORY):
        fingerprint = run.stages.get(stage)
        if run.status != "finished" or fingerprint is None:
            continue
        if fingerprint not in known:
            known[fingerprint] = _find_whole(store, stage, fingerprint)
        if (manifest := known[fingerprint]) is not None:
            found.append(Evaluation(run=run, manifest=manifest))
    return found


def assess(
    store: Store, newest: Evaluation, history: Sequence[Evaluation], rule: Rule
) -> Assessment:
    """Whether `newest` is worse than `rule` allows. Itself in the `history` does not count.

    Raises ConfigError when the metric was not measured.
    """
    scores = scores_of(newest.manifest)
    metric = _metric(newest.manifest, scores, rule)
    earlier = [
        evaluation
        for evaluation in history
        if evaluation.run.run != newest.run.run
        and same_suite(evaluation.manifest, newest.manifest)
        and metric in scores_of(evaluation.manifest)
    ]
    baseline = _baseline(earlier, metric, rule.against)
    if baseline is None:
        return Assessment(
            metric=metric,
            score=scores[metric],
            baseline=None,
            baseline_run=None,
            delta=None,
            drop=rule.drop,
            regressed=False,
        )
    old = scores_of(baseline.manifest)[metric]
    pairs = _pairs(store, baseline.manifest, newest.manifest).get(metric)
    delta = delta_of(old, scores[metric], pairs)
    return Assessment(
        metric=metric,
        score=scores[metric],
        baseline=old,
        baseline_run=baseline.run.run,
        delta=delta,
        drop=rule.drop,
        regressed=-delta.value * _sign(metric) > rule.drop,
    )


def same_suite(first: Manifest, second: Manifest) -> bool:
    """Whether two evaluations differ in the model alone, or not at all."""
    return first.stage == second.stage and _suite(first) == _suite(second)


def history_rows(history: Sequence[Evaluation], metric: str) -> list[dict[str, Any]]:
    """A history as a table, in the order given: the metric first, then what else was measured."""
    rows: list[dict[str, Any]] = []
    for evaluation in history:
        scores = scores_of(evaluation.manifest)
        row: dict[str, Any] = {
            "started": evaluation.run.started,
            "run": evaluation.run.run,
            "model": short(evaluation.model),
            "evaluation": short(evaluation.manifest.fingerprint),
            metric: scores[metric].value if metric in scores else None,
            "low": scores[metric].low if metric in scores else None,
            "high": scores[metric].high if metric in scores else None,
        }
        rows.append(row | {n: s.value for n, s in scores.items() if n != metric})
    return rows


def _suite(manifest: Manifest) -> tuple[Any, ...]:
    """All that an evaluation was made from but the model."""
    data = {name: item.digest for name, item in manifest.inputs.items() if name not in MODELS}
    return manifest.preimage.get("config"), manifest.preimage.get("format"), data


def _metric(manifest: Manifest, scores: Mapping[str, Score], rule: Rule) -> str:
    wanted = _MAIN if rule.metric is None else (rule.metric,)
    for name in wanted:
        if name in scores:
            return name
    named = " or ".join(wanted)
    why = manifest.provenance.metrics.get(f"{wanted[0]}_failed")
    raise ConfigError(
        f"{manifest.name} has not measured {named}" + (f": {why}" if why else ""),
        hint=f"it has measured: {', '.join(list(scores)[:_SHOWN_NAMES]) or 'nothing'}",
    )


def _baseline(earlier: Sequence[Evaluation], metric: str, against: Against) -> Evaluation | None:
    if against == "previous":
        return next(iter(earlier), None)
    return max(
        earlier,
        key=lambda e: scores_of(e.manifest)[metric].value * _sign(metric),
        default=None,
    )


def _sign(metric: str) -> int:
    """1 where more is better, -1 where less is."""
    return -1 if metric.endswith(_LESS_IS_BETTER) else 1


def _pairs(store: Store, old: Manifest, new: Manifest) -> Mapping[str, Answers]:
    """By task, the questions that both answered; none where their records are gone."""
    with tempfile.TemporaryDirectory(prefix="evals-") as room:
        try:
            return answers_of(store, [old, new], Path(room))[0]
        except ArtifactError:  # the scores stand; their difference gets the wider interval
            return {}


def _find_whole(store: Store, stage: str, fingerprint: str) -> Manifest | None:
    try:
        return find_manifest(store, stage, fingerprint)
    except ArtifactError:
        return None


def _shown(score: Score) -> str:
    if score.low is None or score.high is None:
        return number(score.value)
    return f"{number(score.value)} ({number(score.low)} to {number(score.high)})"
