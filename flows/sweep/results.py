"""The results of a sweep: each point's score, and its difference from the base by pairs of seeds.

Text and weights both depend on the seed, so scores of one seed are compared with each other: the
mean of these differences has Student's 95 % interval.

Which points get how many seeds is asynchronous successive halving. Rung r has the points that may
use r + 1 seeds. Of its n points the best ceil(n / reduction), by the mean score over those seeds,
get one more; one that failed gets none. The size of each rung follows from the one before, so a
point continues as soon as enough others are certain to rank behind it, whatever the missing scores
are. An early decision is therefore the one that all scores together would give: the order in which
runs end changes when a run starts, never which runs exist.
"""

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flows.compare.compare import direction, scores_of
from flows.identity.manifest import Manifest
from flows.render.page import Page, Section
from flows.render.paired import Delta
from flows.render.table import Table, numbers, texts
from flows.render.vega import Panel
from flows.sweep.grid import Sweep, SweepPoint
from flows.sweep.plan import Results
from flows.sweep.plots import Series, difference_panel, series_of
from infra.storage.files import write_whole, writing
from nanochat_core.errors import ConfigError
from nanochat_core.evaluate.intervals import mean_over_seeds
from nanochat_core.job import write_json

FORMAT = 2  # of the JSON
FAILED = math.inf  # the score of a point from the seed on that failed
# Fields of the request that decide the results.
_RECORDED = ("profile", "depth", "overrides", "vary", "seeds", "stage", "reduction", "run_name")
_DECIMALS = 4
_REASON = "_failed"  # an evaluation's metric TASK_failed is the reason why TASK has no score
_FOOTER = """The difference from base is the mean over pairs of runs with the same seed, with its
95 % interval by Student's t. Each interval is of one point: of twenty points that are no better
than base, one is expected to have an interval without 0. A point that was stopped ranked behind
others with the same seeds; no interval says that it would have stayed there."""
_SERIES_FOOTER = """The range of a law is what the scatter of these points allows, at 95 %. A
prediction is an extrapolation: nothing says that the law continues."""


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """The results of a sweep. The same results give the same bytes: it has no times."""

    page: Page  # of these:
    pictures: Sequence[Panel]  # none if nothing was measured
    sentences: Sequence[str]
    table: Table
    tree: Mapping[str, Any]  # JSON values


@dataclass(frozen=True, kw_only=True)
class PointResult:
    """The scores of one point."""

    point: SweepPoint
    made: Mapping[int, Manifest | None]  # by seed, of those that it may use; None: it failed
    scores: Mapping[int, float]  # by seed, of the runs that count
    stopped: str  # why it has fewer seeds than others; "": it has all
    from_base: Sequence[float]  # the score less the base's, for each seed that both have

    @property
    def has_failed(self) -> bool:
        """True if a run failed, or has no score."""
        return len(self.scores) < len(self.made)

    @property
    def by_seed(self) -> dict[int, Manifest]:
        """The runs that count, in order."""
        return {seed: made for seed, made in self.made.items() if made and seed in self.scores}

    @property
    def mean(self) -> float | None:
        """The mean score; None if no run ended well."""
        return statistics.fmean(self.scores.values()) if self.scores else None

    @property
    def core(self) -> float | None:
        """The mean CORE score; None if no run measured it."""
        found = [s.value for m in self.by_seed.values() if (s := scores_of(m).get("core"))]
        return statistics.fmean(found) if found else None

    @property
    def difference(self) -> Delta | None:
        """The mean difference from the base, with its interval if there are two seeds or more."""
        if not self.from_base:
            return None
        mean = mean_over_seeds(self.from_base)
        return Delta(**asdict(mean)) if len(self.from_base) > 1 else Delta(value=mean.value)


def wanted_of(sweep: Sweep, results: Results) -> Collection[str]:
    """Return the labels of the members to build, given the results so far: the base with all seeds,
    and each other point with as many as successive halving allows."""
    return {point.member(seed) for point, seeds in _allowed(sweep, results) for seed in seeds}


def results_of(sweep: Sweep, results: Results) -> list[PointResult]:
    """Return the points' results, of the runs that successive halving wants and no others."""
    found: list[PointResult] = []
    base: dict[int, float] = {}
    for point, seeds in _allowed(sweep, results):
        made = {seed: results.get(point.member(seed)) for seed in seeds}
        scores = {s: x for s, m in made.items() if m and (x := score_of(sweep, m)) is not None}
        base = scores if point is sweep.points[0] else base
        after = f"after {len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
        found.append(
            PointResult(
                point=point,
                made=made,
                scores=scores,
                stopped=after if len(seeds) < len(sweep.request.seeds) else "",
                from_base=[scores[seed] - base[seed] for seed in scores if seed in base],
            )
        )
    return found


def score_of(sweep: Sweep, manifest: Manifest) -> float | None:
    """Return the score of the sweep's last stage. None means that it was not measured."""
    # An evaluation in which one task could not be read is built, without the score of all tasks.
    score = scores_of(manifest).get(sweep.metric)
    return score.value if score else None


def _reasons(manifest: Manifest) -> str:
    """Return why tasks of an evaluation have no score, to follow a sentence; "" if none says."""
    metrics = manifest.provenance.metrics.items()
    failed = [f"{k.removesuffix(_REASON)}: {why}" for k, why in metrics if k.endswith(_REASON)]
    return f" ({'; '.join(failed)})" if failed else ""


def report_of_sweep(
    sweep: Sweep, results: Results, store: str, *, errors: Mapping[str, str] | None = None
) -> SweepReport:
    """Return all that is shown of a sweep; the same artifacts give the same report.

    `errors` are those of the stages that failed, by unit label.
    """
    errors = errors or {}
    found = results_of(sweep, results)
    series, base, metric = _series(sweep, found), sweep.points[0].label, sweep.metric
    has_core = any(each.core is not None for each in found)
    points = [
        (" ".join(each.point.cells), mean, each.from_base)
        for each in found
        if (mean := each.difference) is not None
    ]
    if series is not None and series.losses:
        pictures = series.panels
    elif points:
        better = "less" if direction(metric) < 0 else "more"
        axis = f"{metric} less that of {base}, same seeds"
        pictures = [difference_panel(points, f"Sweep {sweep.name}", axis, better=better)]
    else:
        pictures = []
    sentences = [
        *(f"{label}: {error}" for label, error in errors.items()),
        *_sentences(sweep, found),
        *(series.sentences() if series else ()),
    ]
    table = Table(
        columns=(
            *texts(sweep.head[0]),
            *numbers(*sweep.head[1:], "seeds", f"mean {metric}", f"from {base}"),
            *numbers(*(["mean CORE"] if has_core else [])),
            *texts("ended"),
        ),
        rows=[_row(sweep, each, has_core=has_core) for each in found],
    )
    overrides = f" with {', '.join(sweep.request.overrides)}" if sweep.request.overrides else ""
    page = Page(
        kind="Sweep",
        heading=sweep.name,
        lead=[f"Profile {sweep.request.profile}{overrides}; store {store}."],
        sections=[
            Section(charts=pictures),
            Section(title="What the numbers say", items=sentences),
            Section(title="Models", table=table),
        ],
        footer=_FOOTER if series is None else f"{_FOOTER}\n{_SERIES_FOOTER}",
    )
    tree = {**_tree(sweep, found, store), "errors": errors}
    tree |= {"series": asdict(series)} if series else {}
    return SweepReport(page=page, pictures=pictures, sentences=sentences, table=table, tree=tree)


def _series(sweep: Sweep, found: Sequence[PointResult]) -> Series | None:
    """Return the laws of a sweep over depths; None if other settings vary, or no loss is scored."""
    if not sweep.request.is_series or direction(sweep.metric) > 0:
        return None
    # The members begin with every point's first seed; size follows from no seed.
    runs = {m.depth: m.profile.run for m in sweep.members[: len(sweep.points)]}
    losses = {d: r.mean for d, r in zip(runs, found, strict=True) if r.mean is not None}
    return series_of(losses, runs, profile=sweep.request.profile, overrides=sweep.request.overrides)


def _allowed(sweep: Sweep, results: Results) -> Iterator[tuple[SweepPoint, tuple[int, ...]]]:
    """Yield the points, each with the seeds that it may use."""
    seeds = sweep.request.seeds

    def rank(made: Manifest | None) -> float:
        score = score_of(sweep, made) if made else None
        return FAILED if score is None else -direction(sweep.metric) * score

    scores = [
        {i: rank(results[m]) for i, s in enumerate(seeds) if (m := point.member(s)) in results}
        for point in sweep.points[1:]
    ]
    reduction = sweep.request.reduction
    counts = seeds_allowed(scores, num_seeds=len(seeds), reduction=reduction)
    for point, count in zip(sweep.points, [len(seeds), *counts], strict=True):
        yield point, seeds[:count]


def seeds_allowed(
    scores: Sequence[Mapping[int, float]], *, num_seeds: int, reduction: int
) -> list[int]:
    """Return how many seeds each point may use, given the scores so far.

    Args:
        scores: For each point, by index of seed, the known scores; less is better.
        num_seeds: Most seeds of a point, at least 1.
        reduction: One of so many points of a rung continues, rounded up; 1 stops none.
    """
    allowed = [1] * len(scores)
    size = len(scores)
    for rung in range(num_seeds - 1):
        known = sorted(
            (mean, point)
            for point, values in enumerate(scores)
            if allowed[point] > rung and (mean := mean_to(values, rung)) is not None
        )
        missing = size - len(known)
        size = math.ceil(size / reduction)
        whole = [point for mean, point in known if mean < FAILED]
        for point in whole[: max(size - missing, 0)]:  # even if all missing ones are better
            allowed[point] += 1
        if not missing:
            size = min(size, len(whole))
    return allowed


def mean_to(values: Mapping[int, float], rung: int) -> float | None:
    """Return the mean over the seeds 0 to `rung`, FAILED if one failed; None if one is missing."""
    known = [values[seed] for seed in range(rung + 1) if seed in values]
    return math.fsum(known) / len(known) if len(known) > rung else None


def _row(sweep: Sweep, each: PointResult, *, has_core: bool) -> tuple[str, ...]:
    difference = None if each.point is sweep.points[0] else each.difference
    return (
        *each.point.cells,
        f"{len(each.scores)} of {len(sweep.request.seeds)}",
        _number(each.mean),
        difference.text(decimals=_DECIMALS) if difference else "",
        *((_number(each.core),) if has_core else ()),
        "failed" if each.has_failed else f"stopped {each.stopped}" if each.stopped else "",
    )


def _number(score: float | None) -> str:
    return "" if score is None else f"{score:.{_DECIMALS}f}"


def _sentences(sweep: Sweep, found: Sequence[PointResult]) -> Iterator[str]:
    whole = [each for each in found if not each.stopped and not each.has_failed]
    if found[0] in whole:
        yield _best(
            sweep, min(whole, key=lambda each: -direction(sweep.metric) * (each.mean or 0.0))
        )
    else:
        base = found[0].point.label
        yield f"{base} failed: there are no differences from it for its missing seeds"
    if stopped := [each for each in found if each.stopped]:
        labels = ", ".join(f"{each.point.label} {each.stopped}" for each in stopped)
        runs = sum(len(each.scores) for each in found)
        best = f"the best 1 in {sweep.request.reduction} continue"
        yield (
            f"stopped: {labels}; after each seed {best}, so {runs} of {len(sweep.members)} runs "
            "count"
        )
    if len(sweep.request.seeds) == 1:
        yield "one seed has no interval: it does not show which difference is noise"
    for each in found:
        for seed, made in each.made.items():
            if made and seed not in each.scores:
                yield f"{each.point.member(seed)} has no {sweep.metric}{_reasons(made)}"
    for each in found[1:]:
        for stage in ("rows", "task_data"):
            if any(_differs(stage, found[0], each, seed) for seed in each.by_seed):
                names = f"{each.point.label} has other {stage} than {found[0].point.label}"
                yield f"note: {names}, maybe other text"


def _best(sweep: Sweep, best: PointResult) -> str:
    if best.point is sweep.points[0]:
        return (
            f"no point that has all seeds is better than {best.point.label}, by mean {sweep.metric}"
        )
    assert best.difference is not None
    assert best.mean is not None
    text = best.difference.text(decimals=_DECIMALS)
    is_noise = len(best.scores) > 1 and not best.difference.is_clear
    doubt = "; not significant" if is_noise else ""
    settings = ", ".join(best.point.settings)
    return (
        f"best: {best.point.label} ({settings}), {sweep.metric} {best.mean:.{_DECIMALS}f}, "
        f"{text} from {sweep.points[0].label}{doubt}"
    )


def _differs(stage: str, base: PointResult, other: PointResult, seed: int) -> bool:
    if seed not in base.by_seed:
        return False
    one, two = (each.by_seed[seed].inputs.get(stage) for each in (base, other))
    return one is not None and two is not None and one.digest != two.digest


def _tree(sweep: Sweep, found: Sequence[PointResult], store: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "name": sweep.name,
        "store": store,
        **{name: getattr(sweep.request, name) for name in _RECORDED},
        "metric": sweep.metric,
        "points": [
            {
                "label": each.point.label,
                "settings": each.point.settings,
                "scores": {str(seed): score for seed, score in each.scores.items()},
                "fingerprints": {str(s): made.fingerprint for s, made in each.by_seed.items()},
                "mean": each.mean,
                "core": each.core,
                "from_base": asdict(each.difference) if each.difference else None,
                "stopped": bool(each.stopped),
                "failed": each.has_failed,
            }
            for each in found
        ],
    }


def write_files(home: Path, report: SweepReport) -> Path:
    """Write the files to HOME/sweep/NAME, each atomically, replacing older ones; return the page.

    The numbers are next to it, as .json. Raises ConfigError if this machine cannot write there.
    """
    page = home / "sweep" / report.page.heading / "sweep.html"
    content = report.page.html  # drawn before the first write: a failure leaves the older files
    with writing(page.parent, ConfigError):
        page.parent.mkdir(parents=True, exist_ok=True)
        write_json(page.with_suffix(".json"), report.tree)
        write_whole(page, content.encode())
    return page
