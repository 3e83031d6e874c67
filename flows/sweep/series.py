"""The report of a sweep over depths: the size of each model, the law of loss by size, its plots."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flows.profiles import open_profile
from flows.sweep.grid import Size, size_of
from flows.sweep.law import Prediction, ScalingFit, fit_law
from flows.sweep.plots import LawPlot
from nanochat_core.config import RunConfig
from nanochat_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The prediction of a law for one depth."""

    depth: int
    flops: float
    prediction: Prediction
    measured: float | None  # None: the depth was not trained

    @property
    def sentence(self) -> str:
        """The prediction for people."""
        known = self.prediction.range
        between = f"{known.low:.4g} to {known.high:.4g}" if known else "uncertainty unknown"
        text = f"d{self.depth} would be {self.prediction.value:.4f} ({between})"
        if self.measured is None:
            beyond = f"{self.prediction.beyond:.3g} times beyond the largest"
            return f"{text} with {self.flops:.3g} FLOPs: an extrapolation, {beyond}"
        side = ""
        if known:
            side = ", inside" if known.low <= self.measured <= known.high else ", outside"
        return f"from the smaller models {text}; it is {self.measured:.4f}{side}"


@dataclass(frozen=True, kw_only=True)
class Series:
    """The laws of the depths that were evaluated."""

    sizes: Mapping[int, Size]  # by depth, the smallest first
    losses: Mapping[int, float]
    by_flops: ScalingFit
    by_parameters: ScalingFit  # of the scaling parameters
    expected: tuple[Expected, ...]  # the largest depth from the others, and the next depth

    def plots(self, title: str) -> list[LawPlot]:
        """Return the plots by FLOPs and by parameters."""
        labels = [f"d{depth}" for depth in self.sizes]
        dots = [
            (f"d{e.depth}?", e.flops, e.prediction) for e in self.expected if e.measured is None
        ]
        return [
            LawPlot(
                title=title, axis=axis, form=form, symbol=symbol, fit=fit, labels=labels, next=dots
            )
            for axis, form, symbol, fit, dots in (
                ("C, FLOPs of training", "~e", "C", self.by_flops, dots),
                ("N, parameters of matrices and lm_head", "~s", "N", self.by_parameters, []),
            )
        ]

    def sentences(self) -> Iterator[str]:
        """Yield the laws as sentences for people, doubts included."""
        for what, symbol, fit in (
            ("FLOPs", "C", self.by_flops),
            ("scaling parameters", "N", self.by_parameters),
        ):
            if fit.law is not None:
                text = f"by {what}: val_bpb = {fit.law.formula(symbol)}"
                yield f"{text}{_certainty(fit)}"
            # Both fits mostly have the same doubts: those of the second only if it has no law.
            if symbol == "C" or fit.law is None:
                yield from (f"by {what}: {doubt}" for doubt in fit.doubts)
        yield from (each.sentence for each in self.expected)
        ratios = [size.tokens / size.scaling_parameters for size in self.sizes.values()]
        # Training ends at whole steps, so equal ratios come out a little unequal.
        if ratios and max(ratios) > 1.1 * min(ratios):
            yield (
                f"note: tokens per parameter go from {max(ratios):.3g} to {min(ratios):.3g}: a law "
                "of this series is not one of models that are each trained in proportion to their "
                "size"
            )

    def tree(self) -> dict[str, Any]:
        """Return the laws as JSON values."""
        return asdict(self)


def series_of(
    losses: Mapping[int, float],
    runs: Mapping[int, RunConfig],
    *,
    profile: str,
    overrides: Sequence[str],
) -> Series:
    """Fit the laws to the losses by depth. The same losses give the same series."""
    sizes = {depth: size_of(runs[depth]) for depth in sorted(losses)}
    points = [(size.flops, losses[depth]) for depth, size in sizes.items()]
    by_flops = fit_law(points)
    expected: list[Expected] = []
    if len(points) > 2:  # two smaller models are the fewest that determine a law
        smaller = fit_law(points[:-1])
        expected += _expect(smaller, max(sizes), points[-1][0], measured=points[-1][1])
    if len(points) > 1:
        # As far beyond the largest depth as that is from the one before.
        *_, before, last = sizes
        try:
            after = open_profile(
                profile, depth=2 * last - before, overrides=overrides, snapshots=False
            )
            expected += _expect(by_flops, 2 * last - before, size_of(after.run).flops)
        except ConfigError:  # too many layers
            pass
    return Series(
        sizes=sizes,
        losses={depth: losses[depth] for depth in sizes},
        by_flops=by_flops,
        by_parameters=fit_law([(s.scaling_parameters, losses[d]) for d, s in sizes.items()]),
        expected=tuple(expected),
    )


def _expect(
    fit: ScalingFit, depth: int, flops: float, measured: float | None = None
) -> list[Expected]:
    found = fit.predict(flops)
    if found is None:
        return []
    return [Expected(depth=depth, flops=flops, prediction=found, measured=measured)]


def _certainty(fit: ScalingFit) -> str:
    parts: list[str] = []
    # A range that reaches an end of the search is no range: a doubt reports it instead.
    if fit.exponent_range and not any(doubt.startswith("the exponent") for doubt in fit.doubts):
        known = fit.exponent_range
        parts.append(f"exponent {known.low:.3g} to {known.high:.3g}")
    if fit.law is not None and fit.floor_range and fit.law.floor:
        parts.append(f"floor {fit.floor_range.low:.3g} to {fit.floor_range.high:.3g}")
    if fit.law is not None and fit.law.scatter is not None:
        parts.append(f"scatter {100 * fit.law.scatter:.2g} %")
    return f" ({', '.join(parts)})" if parts else ""
