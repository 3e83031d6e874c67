"""Training curves of several artifacts of a stage, step by step, on a common scale."""

import math
from collections.abc import Sequence
from typing import Any

from flows.artifacts.transfer import read_file
from flows.compare.tables import METRICS
from flows.identity.manifest import Manifest
from flows.render.charts import Chart, Points, thin
from flows.render.paired import read_rows
from flows.stages import Quantity
from flows.stages import curves_of as quantities_of
from infra.storage.base import Store

_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
WIDTH = 48
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
    values = [value for points in chart.curves for _, value in thin(points, WIDTH)]
    (first, last), (low, high) = ends = (min(steps), max(steps)), (min(values), max(values))
    width = max(map(len, names))
    lines = [f"{chart.quantity.title}, steps {first} to {last}, {low:.4g} to {high:.4g}"]
    for name, points in zip(names, chart.curves, strict=True):
        ending = f"{points[-1][1]:.4g}" if points else "not recorded"
        lines.append(f"  {name.ljust(width)}  {curve(points, *ends)}  {ending}")
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


def curve(points: Points, steps: tuple[int, int], values: tuple[float, float]) -> str:
    """Return a curve as WIDTH blocks over these steps, whose height is the value between `values`.

    Each block is the mean of its share of the steps; one without a step is a gap.
    """
    (first, last), (low, high) = steps, values
    cells: dict[int, list[float]] = {}
    for step, value in points:
        place = int((step - first) / max(last - first, 1) * WIDTH)
        cells.setdefault(min(place, WIDTH - 1), []).append(value)  # the last step is in the last
    means = {place: math.fsum(found) / len(found) for place, found in cells.items()}
    heights = {
        place: int((mean - low) / (high - low) * len(_BLOCKS)) if high > low else len(_BLOCKS) // 2
        for place, mean in means.items()
    }
    return "".join(
        _BLOCKS[min(max(heights[i], 0), len(_BLOCKS) - 1)] if i in heights else GAP
        for i in range(WIDTH)
    )
