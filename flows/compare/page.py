"""The page of a comparison: scores, what differs, and the curves of training."""

from pathlib import Path

from flows.compare.score_table import Compared
from flows.render.charts import line_style
from flows.render.page import Page, Section, write_whole
from flows.render.vega import IN_PAGE
from infra.storage.files import writing
from nanochat_core.errors import ConfigError

_FOOTER = """Differences are from the first. A coloured one is larger than other questions of the
same kind would explain (95 %); another seed of training may still. A curve is a moving average."""


def page_of(compared: Compared) -> str:
    """Return a comparison as HTML. The same numbers give the same text."""
    training = Section(
        title="Training",
        key={name: line_style(index, IN_PAGE) for index, name in enumerate(compared.names)},
        charts=[(c.quantity.title, c.quantity.caption, "", c) for c in compared.charts],
        table=compared.table("training", compared.others),
    )
    same = [compared.same_artifacts] if compared.same else []
    return Page(
        kind="Compared",
        heading=compared.title,
        lead=compared.verdicts,
        sections=[
            Section(table=compared.table("score", compared.scores)),
            Section(title="What differs", items=[*compared.differences(), *same]),
            training,
        ],
        footer=_FOOTER,
    ).html


def write(path: Path, page: str) -> None:
    """Write the page to `path` atomically. Raises ConfigError if it cannot be written."""
    hint = "name a file in an existing directory, with --html"
    with writing(path, ConfigError, hint=hint):
        write_whole(path.expanduser(), page.encode())
