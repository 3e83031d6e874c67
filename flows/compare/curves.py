"""Training curves of several artifacts of a stage, step by step, on a common scale."""

import math
from collections.abc import Sequence
from typing import Any

from flows.artifacts.transfer import read_file
from flows.compare.tables import METRICS
from flows.identity.manifest import Manifest
from flows.render.charts import Chart, Points, thin
from flows.render.parquet import read_rows
from flows.render.text_charts import curve, scale_of
from flows.stages import Quantity
from flows.stages import curves_of as quantities_of
from infra.storage.base import Store


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
