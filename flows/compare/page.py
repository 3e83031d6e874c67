"""A comparison of runs as one HTML file: curves and scores, without scripts or requests."""

from pathlib import Path

from flows.compare.score_table import Compared
from flows.render.charts import line_style
from flows.render.html import fill, write_whole
from flows.render.vega import IN_PAGE
from infra.storage.files import writing
from nanochat_core.errors import ConfigError

TEMPLATE = Path(__file__).with_name("compare.html.jinja")


def render(compared: Compared) -> str:
    """Return the page as HTML. The same numbers give the same text."""
    keys = [(name, line_style(index, IN_PAGE)) for index, name in enumerate(compared.names)]
    return fill(TEMPLATE, compared=compared, keys=keys)


def write(path: Path, page: str) -> None:
    """Write the page to `path` atomically. Raises ConfigError if it cannot be written."""
    hint = "name a file in an existing directory, with --html"
    with writing(path, ConfigError, hint=hint):
        write_whole(path.expanduser(), page.encode())
