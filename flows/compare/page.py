"""Several runs side by side as one HTML file: their curves and scores. No script, no request."""

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
    """One stage of all that are compared."""

    name: str
    same: bool  # all have the very same artifact
    rows: Sequence[Sequence[str]]  # metric, then of each its score and what that is from the first
    curves: Sequence[Curves]


def render(names: Sequence[str], stages: Sequence[Compared]) -> str:
    """The page. The same numbers give the same text."""
    return fill(
        TEMPLATE,
        keys=[(name, *_key(place)) for place, name in enumerate(names)],
        stages=stages,
        overlays={stage.name: list(map(_overlay, stage.curves)) for stage in stages},
    )


def write(path: Path, page: str) -> None:
    """Put the page at `path`, whole or not at all. Raises ConfigError where that cannot be."""
    path = path.expanduser()
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(
            f"{path} cannot be written: {(error.strerror or str(error)).lower()}",
            hint="name a file in a directory that is there, with --html",
        ) from error


def curve_tree(curves: Curves) -> Mapping[str, Any]:
    """Curves for programs: their points thinned, as they are drawn."""
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
    """Colour and kind of line."""
    colour, dash = colour_of(place)
    return colour, "solid" if dash == [1, 0] else "dashed"
