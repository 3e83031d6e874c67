"""A comparison of runs as one HTML file: curves and scores, without scripts or requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.compare.curves import Curves
from flows.render.charts import Overlay, colour_of, thin
from flows.render.html import fill
from nanochat_core.errors import ConfigError

TEMPLATE = Path(__file__).with_name("compare.html.jinja")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One stage of all runs that are compared."""

    name: str
    same: bool  # all runs have the same artifact
    # A row: the metric, then for each run its score and the difference from the first.
    rows: Sequence[Sequence[str]]
    curves: Sequence[Curves]


def render(names: Sequence[str], stages: Sequence[Compared]) -> str:
    """Return the page as HTML. The same numbers give the same text."""
    return fill(
        TEMPLATE,
        keys=[(name, *_key(place)) for place, name in enumerate(names)],
        stages=stages,
        overlays={stage.name: list(map(_overlay, stage.curves)) for stage in stages},
    )


def write(path: Path, page: str) -> None:
    """Write the page to `path` atomically. Raises ConfigError if it cannot be written."""
    path = path.expanduser()
    # In the same directory, since a rename across file systems is not atomic, or fails.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(
            f"{path} cannot be written: {(error.strerror or str(error)).lower()}",
            hint="name a file in an existing directory, with --html",
        ) from error


def curve_tree(curves: Curves) -> Mapping[str, Any]:
    """Return curves as JSON values, for programs; the points are thinned as in the drawing."""
    # Thinned, since a long run has 100,000 steps, and a chart shows a few hundred points.
    return {
        "metric": curves.quantity.name,
        "of": [[[step, value] for step, value in thin(points)] for points in curves.of],
    }


def _overlay(curves: Curves) -> Overlay:
    quantity = curves.quantity
    return Overlay(
        title=quantity.title,
        caption=quantity.caption,
        curves=curves.of,
        noisy=quantity.kind == "step",
    )


def _key(place: int) -> tuple[str, str]:
    """Return the colour and kind of line of the run at this index."""
    colour, dash = colour_of(place)
    return colour, "solid" if dash == [1, 0] else "dashed"
