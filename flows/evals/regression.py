"""Detection of regressions: a model's newest evaluation against earlier ones of the same name.

Only evaluations of the same suite compare: same stage, settings and data, another model. A model
that did not change has the same evaluation artifact. So a loss against the `previous` evaluation is
reported once, on the day of the change; against the `best` one, every time until it is recovered.

A loss is a regression if it exceeds what the rule allows and the 95 % interval of the difference,
of pairs of answers or of rows of text, excludes 0. Without an interval the rule alone decides.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from flows.artifacts.publish import find_whole
from flows.artifacts.runs import Run, newest_runs
from flows.compare.compare import delta_between, direction, scores_of
from flows.evals.suite import EvalRequest
from flows.identity.manifest import Manifest
from flows.identity.ref import short
from flows.render.paired import Delta, Score
from flows.render.text import listed, number
from flows.stages import EVALUATORS
from infra.storage.base import Store
from nanochat_core.errors import ConfigError

USUAL = ("chatcore", "core", "val_bpb")  # default metrics: the first that was measured is used
_HISTORY = 200  # newest runs of a name that are read
_SHOWN_NAMES = 12


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One run's evaluation of a model."""

    run: Run
    manifest: Manifest  # of the evaluation stage

    @property
    def model(self) -> str:
        """The fingerprint of the model, or "" if the manifest has no model among its inputs."""
        return next((i.fingerprint for n, i in self.manifest.inputs.items() if n in EVALUATORS), "")


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """The newest value of a metric, compared with a baseline."""

    metric: str
    score: Score
    drop: float  # that was allowed
    baseline: Score | None = None  # None: no earlier evaluation compares
    baseline_run: str | None = None
    delta: Delta | None = None  # from the baseline
    regressed: bool = False

    @property
    def is_inside(self) -> bool:
        """True if the 95 % interval of the difference includes 0: other questions may undo it.

        False without an interval, or if nothing changed.
        """
        if self.delta is None or self.delta.low is None or self.delta.value == 0:
            return False
        return not self.delta.is_clear

    @property
    def text(self) -> str:
        """The assessment in one line, for people."""
        shown = f"{self.metric} {self.score.text()}"
        if self.baseline is None or self.delta is None:
            return f"{shown}; there is no earlier evaluation to compare it with"
        if self.delta.value == 0:
            return f"{shown}, as in run {self.baseline_run}"
        text = f"{shown}, {self.delta.text()} against {number(self.baseline.value)} of run "
        text += f"{self.baseline_run}"
        if self.regressed:
            text += f": worse by more than {number(self.drop)}"
        return text + ("; the interval of the difference includes 0" if self.is_inside else "")

    @property
    def facts(self) -> dict[str, Any]:
        """The assessment as JSON values, for programs."""
        return {**asdict(self), "inside_interval": self.is_inside, "text": self.text}


def read_history(store: Store, name: str, stage: str) -> list[Evaluation]:
    """Read the evaluations of `stage` by finished runs called `name`, latest first.

    Evaluations with a damaged manifest are left out. The name is a run's, not a tag's: see
    `flows.evals.suite.history_name`.
    """
    # Nightly runs of an unchanged model share one artifact: one request for all of them.
    find = functools.cache(functools.partial(find_whole, store))
    return [
        Evaluation(run=run, manifest=manifest)
        for run in islice(newest_runs(store, name), _HISTORY)
        if run.status == "finished" and (ref := run.find_ref(stage)) and (manifest := find(ref))
    ]


def assess(
    store: Store, newest: Evaluation, history: Sequence[Evaluation], rule: EvalRequest
) -> Assessment:
    """Compare `newest` with its baseline in the `history`, in which it may be itself.

    Raises ConfigError if the metric was not measured.
    """
    scores = scores_of(newest.manifest)
    metric = _metric(newest.manifest, scores, rule)
    earlier = [
        (evaluation, score)
        for evaluation in history
        if evaluation.run.run != newest.run.run
        and _suite(evaluation.manifest) == _suite(newest.manifest)
        and (score := scores_of(evaluation.manifest).get(metric))
    ]
    found = Assessment(metric=metric, score=scores[metric], drop=rule.drop)
    if not earlier:
        return found
    better = direction(metric)
    baseline, score = earlier[0]
    if rule.against == "best":
        baseline, score = max(earlier, key=lambda item: item[1].value * better)
    delta = delta_between(store, baseline.manifest, newest.manifest, metric)
    found = replace(found, baseline=score, baseline_run=baseline.run.run, delta=delta)
    # Strictly more than `drop`, so that a drop of 0 does not report an unchanged model.
    is_worse = -delta.value * better > rule.drop
    return replace(found, regressed=is_worse and not found.is_inside)


def history_rows(history: Sequence[Evaluation], metric: str) -> list[dict[str, str]]:
    """Return a history as table rows in its order: the metric first, then the other scores."""
    return [
        {
            "started": evaluation.run.started,
            "run": evaluation.run.run,
            "model": short(evaluation.model),
            "evaluation": short(evaluation.manifest.fingerprint),
            metric: "",
            **{name: score.text() for name, score in scores_of(evaluation.manifest).items()},
        }
        for evaluation in history
    ]


def _suite(manifest: Manifest) -> tuple[Any, ...]:
    """Return everything that an evaluation was made from, except the model."""
    # Digests of the inputs' content, not fingerprints: the same data made twice still compares.
    data = {name: item.digest for name, item in manifest.inputs.items() if name not in EVALUATORS}
    return manifest.preimage.get("config"), manifest.preimage.get("format"), data


def _metric(manifest: Manifest, scores: Mapping[str, Score], rule: EvalRequest) -> str:
    wanted = USUAL if rule.metric is None else (rule.metric,)
    for name in wanted:
        if name in scores:
            return name
    named = " or ".join(wanted)
    # A task that could not be run, for example without a sandbox, records the reason under this
    # name.
    why = manifest.provenance.metrics.get(f"{wanted[0]}_failed")
    raise ConfigError(
        f"{manifest.name} has not measured {named}" + (f": {why}" if why else ""),
        hint=f"it has measured: {listed(list(scores), _SHOWN_NAMES) or 'nothing'}",
    )
