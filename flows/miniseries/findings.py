"""The findings of a series: its points, laws fitted to them, a prediction of the next depth."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flows.artifacts.runs import Run
from flows.miniseries.points import Missing, Point, Size, notes_on, read_point, size_of
from flows.miniseries.scaling_law import Law, Prediction, ScalingFit, fit_law
from flows.profiles import PROFILES, open_profile
from flows.render.text import count, duration
from infra.storage.base import Store
from nanochat_core.errors import ConfigError

FORMAT = 1  # of the JSON
_NAMES = {  # in the JSON
    "by_flops": "val_bpb_by_flops",
    "by_parameters": "val_bpb_by_scaling_parameters",
    "check": "largest_from_the_others",
}
HEADER = (
    *("depth", "parameters", "scaling", "tokens", "tokens/param", "FLOPs"),
    *("val_bpb", "CORE", "trained in"),
)
SIZES = 6  # the first columns of HEADER, which follow from settings without any training


@dataclass(frozen=True, kw_only=True)
class Next:
    """The law's prediction for the next depth, which was not trained."""

    depth: int
    size: Size
    prediction: Prediction


@dataclass(frozen=True, kw_only=True)
class PredictionCheck:
    """A prediction for the largest model from the smaller ones, with what was measured."""

    depth: int
    measured: float
    prediction: Prediction


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All results of a series."""

    name: str
    profile: str
    overrides: tuple[str, ...]
    store: str
    points: tuple[Point, ...]  # the smallest depth first
    missing: tuple[Missing, ...]
    by_flops: ScalingFit
    by_parameters: ScalingFit  # of the scaling parameters
    next: Next | None
    check: PredictionCheck | None
    notes: tuple[str, ...]


def analyse(
    store: Store,
    runs: Mapping[int, Run | Missing],
    *,
    name: str,
    profile: str,
) -> Findings:
    """Read the points of `runs`, by depth, and fit the laws. Deterministic for a given store."""
    # All runs of a series were started with the same overrides.
    overrides = next((run.overrides for run in runs.values() if isinstance(run, Run)), ())
    read = [
        run if isinstance(run, Missing) else read_point(store, run, depth)
        for depth, run in sorted(runs.items())
    ]
    points = tuple(item for item in read if isinstance(item, Point))
    by_flops = _fit_by_flops(points)
    return Findings(
        name=name,
        profile=profile,
        overrides=overrides,
        store=store.url,
        points=points,
        missing=tuple(item for item in read if isinstance(item, Missing)),
        by_flops=by_flops,
        by_parameters=fit_law([(p.size.scaling_parameters, p.val_bpb.value) for p in points]),
        next=_next(by_flops, points, profile, overrides),
        check=_check(points),
        notes=tuple(notes_on(points)),
    )


def _fit_by_flops(points: Sequence[Point]) -> ScalingFit:
    return fit_law([(point.size.flops, point.val_bpb.value) for point in points])


def _next(
    fit: ScalingFit, points: Sequence[Point], profile: str, overrides: Sequence[str]
) -> Next | None:
    """Return a prediction one step beyond the largest depth; None without a law or such a model.

    The step is the distance between the two largest depths.
    """
    if len(points) < 2 or profile not in PROFILES:
        return None
    depth = 2 * points[-1].depth - points[-2].depth
    try:
        run = open_profile(profile, depth=depth, overrides=overrides, snapshots=False).run
    except ConfigError:  # too many layers, or an override that this version of the code lacks
        return None
    size = size_of(run.model, run.numerics, run.pretrain)
    prediction = fit.predict(size.flops)
    return prediction and Next(depth=depth, size=size, prediction=prediction)


def _check(points: Sequence[Point]) -> PredictionCheck | None:
    # Two smaller models are the fewest that determine a law.
    if len(points) < 3:
        return None
    last = points[-1]
    prediction = _fit_by_flops(points[:-1]).predict(last.size.flops)
    return prediction and PredictionCheck(
        depth=last.depth, measured=last.val_bpb.value, prediction=prediction
    )


def to_tree(findings: Findings) -> dict[str, Any]:
    """Return the findings as JSON values, for programs."""
    # No time in it, so that the same findings give the same bytes.
    tree = asdict(findings)
    for fit in (tree["by_flops"], tree["by_parameters"]):
        del fit["points"]  # among the findings already
    return {"format": FORMAT, **{_NAMES.get(name, name): value for name, value in tree.items()}}


def rows(findings: Findings) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table for people; HEADER is its head."""
    for point in findings.points:
        scores = [found.text(decimals=4) if found else "" for found in (point.val_bpb, point.core)]
        yield (*cells_of(point.depth, point.size), *scores, duration(point.seconds))


def cells_of(depth: int, size: Size) -> tuple[str, ...]:
    """Return the cells that follow from a model's settings: the first of HEADER."""
    return (
        f"d{depth}",
        count(size.parameters),
        count(size.scaling_parameters),
        count(size.tokens),
        f"{size.tokens / size.scaling_parameters:.3g}",
        f"{size.flops:.3g}",
    )


def sentences(findings: Findings) -> Iterator[str]:
    """Yield the findings as sentences for people, doubts included."""
    for what, symbol, fit in (
        ("FLOPs", "C", findings.by_flops),
        ("scaling parameters", "N", findings.by_parameters),
    ):
        if fit.law is not None:
            yield f"by {what}: val_bpb = {formula(fit.law, symbol)}{_certainty(fit, fit.law)}"
        # The doubts of both fits are mostly the same: those of the second only if it has no law.
        doubts = fit.doubts if symbol == "C" or fit.law is None else ()
        yield from (f"by {what}: {doubt}" for doubt in doubts)
    if findings.check is not None:
        yield _check_sentence(findings.check)
    if findings.next is not None:
        yield _next_sentence(findings.next)
    yield from (f"note: {note}" for note in findings.notes)
    yield from (f"d{missing.depth} is missing: {missing.why}" for missing in findings.missing)


def formula(law: Law, symbol: str) -> str:
    """Format a law: 0.52 + 21.3 C^-0.081."""
    floor = f"{law.floor:.4g} + " if law.floor else ""
    return f"{floor}{law.scale:.4g} {symbol}^-{law.exponent:.3g}"


def _certainty(fit: ScalingFit, law: Law) -> str:
    parts: list[str] = []
    # A range that reaches an end of the search is no range: a doubt reports it instead.
    if law.exponent_range and not any(doubt.startswith("the exponent") for doubt in fit.doubts):
        known = law.exponent_range
        parts.append(f"exponent {known.low:.3g} to {known.high:.3g}")
    if fit.floor_range and law.floor:
        parts.append(f"floor {fit.floor_range.low:.3g} to {fit.floor_range.high:.3g}")
    if law.scatter is not None:
        parts.append(f"scatter {100 * law.scatter:.2g} %")
    return f" ({', '.join(parts)})" if parts else ""


def _between(prediction: Prediction) -> str:
    known = prediction.range
    return f"{known.low:.4g} to {known.high:.4g}" if known else "uncertainty unknown"


def _check_sentence(check: PredictionCheck) -> str:
    text = (
        f"from the smaller models d{check.depth} would be {check.prediction.value:.4f} "
        f"({_between(check.prediction)}); it is {check.measured:.4f}"
    )
    if (known := check.prediction.range) is None:
        return text
    return text + (", inside" if known.low <= check.measured <= known.high else ", outside")


def _next_sentence(after: Next) -> str:
    return (
        f"d{after.depth} would be {after.prediction.value:.4f} ({_between(after.prediction)}) "
        f"with {after.size.flops:.3g} FLOPs: an extrapolation, "
        f"{after.prediction.beyond:.3g} times beyond the largest"
    )
