"""Curves in a terminal, one line each."""

import math
from collections.abc import Sequence

from flows.render.charts import Points

_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
GAP = "\u00b7"  # an empty cell; not a space, since tables strip spaces


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
