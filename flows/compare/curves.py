"""Training curves of several artifacts of a stage, step by step, on a common scale."""

import math
from collections.abc import Sequence
from typing import Any

from flows.artifacts.transfer import read_file
from flows.compare.tables import METRICS
from flows.identity.manifest import Manifest
from flows.render.charts import Chart, Points, thin
from flows.render.parquet import read_rows
from flows.stages import Quantity
from flows.stages import curves_of as quantities_of
from infra.storage.base import Store

_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
GAP = "\u00b7"  # an empty cell; not a space, since tables strip spaces


def curves_of(store: Store, stage: str, manifests: Sequence[Manifest | None]) -> list[Chart]:
    """Return the curves of every quantity that at least one of the artifacts recorded.

    Raises ArtifactError if a file is missing or damaged.
    """
    wanted = quantities_of(stage)
    if not wanted:
        return []
    tables = [_read(store, manifest, wanted) for manifest in manifests]
    found = (
        Chart(quantity=quantity, curves=[table.get(quantity.name, ()) for table in tables])
        for quantity in wanted
    )
    return [chart for chart in found if any(chart.curves)]


def drawn(chart: Chart, names: Sequence[str]) -> list[str]:
    """Return a chart as lines for a terminal: a title, then each curve on the same scale."""
    steps = [step for points in chart.curves for step, _ in points]
    # The scale of thinned points, which are averages: single noisy steps would stretch it.
    low, high = scale_of([value for points in chart.curves for _, value in thin(points, 48)])
    width = max(map(len, names))
    first, last = min(steps), max(steps)
    lines = [f"{chart.quantity.title}, steps {first} to {last}, {low:.4g} to {high:.4g}"]
    for name, points in zip(names, chart.curves, strict=True):
        line = curve(points, first=first, last=last, low=low, high=high)
        ending = f"{points[-1][1]:.4g}" if points else "not recorded"
        lines.append(f"  {name.ljust(width)}  {line}  {ending}")
    return lines


def curve_tree(chart: Chart) -> dict[str, Any]:
    """Return a chart as JSON values, for programs; the points are thinned as in the drawing."""
    # Thinned, since a long run has 100,000 steps, and a chart shows a few hundred points.
    return {"metric": chart.quantity.name, "of": [thin(points) for points in chart.curves]}


def _read(store: Store, manifest: Manifest | None, wanted: Sequence[Quantity]) -> dict[str, Points]:
    """Read (step, value) of each quantity in the artifact's table of steps, in order of step."""
    data = read_file(store, manifest, METRICS) if manifest else None
    if manifest is None or data is None:
        return {}
    names = {quantity.name for quantity in wanted}
    rows = read_rows(data, f"{METRICS} of {manifest.name}", {"step", *names})
    return {
        name: sorted(
            (row["step"], value)
            for row in rows
            if (value := row.get(name)) is not None and math.isfinite(value)
        )
        for name in names
    }


def curve(
    points: Points, *, first: int, last: int, low: float, high: float, width: int = 48
) -> str:
    """Return values over the steps `first` to `last` as `width` blocks whose height is the value.

    Each block is the mean of its share of the steps. One without a step is a gap, unless there are
    steps on both sides: then it has the height of the block before.
    """
    cells: list[list[float]] = [[] for _ in range(width)]
    for step, value in points:
        share = (step - first) / max(last - first, 1)
        if 0 <= share <= 1:
            # min: the last step has share 1 and belongs to the last cell.
            cells[min(int(share * width), width - 1)].append(value)
    known = [i for i, cell in enumerate(cells) if cell]
    shown = ""
    for i, cell in enumerate(cells):
        if cell:
            shown += _block(math.fsum(cell) / len(cell), low, high)
        else:
            between = bool(known) and known[0] < i < known[-1]
            shown += shown[-1] if between else GAP
    return shown


def scale_of(numbers: Sequence[float | None]) -> tuple[float, float]:
    """Return the smallest and the largest of the finite numbers, of which there must be one."""
    finite = [n for n in numbers if n is not None and math.isfinite(n)]
    return min(finite), max(finite)


def _block(value: float, low: float, high: float) -> str:
    share = (value - low) / (high - low) if high > low else 0.5
    return _BLOCKS[min(max(int(share * len(_BLOCKS)), 0), len(_BLOCKS) - 1)]
