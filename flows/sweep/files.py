"""The report of a sweep, and its files in a home: a page, a picture, numbers for programs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flows.render.html import fill, write_whole
from flows.render.table import columns
from infra.storage.files import writing
from nanochat_core.errors import ConfigError
from nanochat_core.job import write_json

TEMPLATE = Path(__file__).with_name("page.html.jinja")


class Drawing(Protocol):
    """A plot of a report."""

    @property
    def axis(self) -> str:
        """The quantity of the x axis."""
        ...

    @property
    def caption(self) -> str:
        """A line about the plot."""
        ...

    def svg(self) -> str:
        """Return the plot as SVG for a page."""
        ...

    def png(self) -> bytes:
        """Return the plot as PNG."""
        ...


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """The results of a sweep. The same results give the same bytes: it has no times."""

    name: str
    heading: str
    profile: str
    overrides: tuple[str, ...]  # that all members have
    store: str
    pictures: Sequence[Drawing]  # none if nothing was measured
    sentences: Sequence[str]
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_numbers: int  # columns after the first that a terminal aligns to the right
    footer: str
    tree: Mapping[str, Any]  # JSON values

    def lines(self, *, width: int | None) -> Iterator[str]:
        """Yield the table and the sentences, for a terminal of this width; see `columns`."""
        right = range(1, 1 + self.num_numbers)
        yield from columns([self.header, *self.rows], right=right, width=width)
        yield ""
        yield from self.sentences


@dataclass(frozen=True, kw_only=True)
class Files:
    """The paths of the files."""

    page: Path
    picture: Path | None  # None: nothing was measured
    numbers: Path


def write_files(home: Path, report: SweepReport) -> Files:
    """Write the files to HOME/sweep/NAME, each atomically, replacing older ones.

    Raises ConfigError if this machine cannot draw, or cannot write there.
    """
    directory = home / "sweep" / report.name
    page = fill(TEMPLATE, report=report)
    # Everything is rendered before the first write: a failure leaves the older files as they were.
    picture = report.pictures[0].png() if report.pictures else None
    drawn = directory / "sweep.png"
    files = Files(
        page=directory / "sweep.html",
        picture=drawn if picture else None,
        numbers=directory / "sweep.json",
    )
    with writing(directory, ConfigError):
        directory.mkdir(parents=True, exist_ok=True)
        write_json(files.numbers, report.tree)
        write_whole(files.page, page.encode())
        if picture:
            write_whole(drawn, picture)
        else:
            # One of an earlier run would show points that are not in the page.
            drawn.unlink(missing_ok=True)
    return files
