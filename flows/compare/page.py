"""Pages of results, each one HTML file: notes, charts and tables; and that of a comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.compare.score_table import Compared
from flows.render.charts import line_style
from flows.render.html import fill, write_whole
from flows.render.table import Table
from flows.render.vega import IN_PAGE, Drawable
from infra.storage.files import writing
from nanochat_core.errors import ConfigError

TEMPLATE = Path(__file__).with_name("page.html.jinja")
_FOOTER = """Differences are from the first. A coloured one is larger than other questions of the
same kind would explain (95 %); another seed of training may still. A curve is a moving average."""


@dataclass(frozen=True, kw_only=True)
class PageSection:
    """One section of a page; all its parts are optional."""

    title: str = ""
    key: Mapping[str, Mapping[str, Any]] | None = None  # by name: the style of its lines in charts
    charts: Sequence[tuple[str, str, Drawable]] = ()  # title, caption, drawing
    notes: Sequence[str] = ()
    table: Table | None = None


def render(
    *, kind: str, heading: str, lead: Sequence[str], sections: Sequence[PageSection], footer: str
) -> str:
    """Return a page as HTML, without its empty sections. The same content gives the same text."""
    return fill(TEMPLATE, kind=kind, heading=heading, lead=lead, sections=sections, footer=footer)


def page_of(compared: Compared) -> str:
    """Return a comparison as HTML. The same numbers give the same text."""
    training = PageSection(
        title="Training",
        key={name: line_style(index, IN_PAGE) for index, name in enumerate(compared.names)},
        charts=[(c.quantity.title, c.quantity.caption, c) for c in compared.charts],
        table=compared.table("training", compared.others),
    )
    same = [compared.same_artifacts] if compared.same else []
    return render(
        kind="Compared",
        heading=compared.title,
        lead=compared.verdicts,
        sections=[
            PageSection(table=compared.table("score", compared.scores)),
            PageSection(title="What differs", notes=[*compared.differences(), *same]),
            training,
        ],
        footer=_FOOTER,
    )


def write(path: Path, page: str) -> None:
    """Write the page to `path` atomically. Raises ConfigError if it cannot be written."""
    hint = "name a file in an existing directory, with --html"
    with writing(path, ConfigError, hint=hint):
        write_whole(path.expanduser(), page.encode())
