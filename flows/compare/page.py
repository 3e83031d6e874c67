"""A comparison of runs as one HTML file: curves and scores, without scripts or requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.render.charts import Chart, line_style
from flows.render.html import fill, write_whole
from flows.render.vega import IN_PAGE
from infra.storage.files import writing
from nanochat_core.errors import ConfigError

TEMPLATE = Path(__file__).with_name("compare.html.jinja")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One stage of all runs that are compared."""

    name: str
    same: bool  # all runs have the same artifact
    # A row: the metric, then for each run its score and the difference from the first.
    rows: Sequence[Sequence[str]]
    curves: Sequence[Chart]


def render(
    names: Sequence[str], changes: Mapping[str, Sequence[str]], stages: Sequence[Compared]
) -> str:
    """Return the page as HTML; `changes` are each name's from the first.

    The same numbers give the same text.
    """
    return fill(
        TEMPLATE,
        keys=[(name, line_style(index, IN_PAGE)) for index, name in enumerate(names)],
        changes=changes,
        stages=[stage for stage in stages if not stage.same],
        same=[stage.name for stage in stages if stage.same],
    )


def write(path: Path, page: str) -> None:
    """Write the page to `path` atomically. Raises ConfigError if it cannot be written."""
    hint = "name a file in an existing directory, with --html"
    with writing(path, ConfigError, hint=hint):
        write_whole(path.expanduser(), page.encode())
