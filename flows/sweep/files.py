"""The report of a sweep, and its files in a home: a page, a picture, numbers for programs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.compare.page import PageSection, render
from flows.render.html import write_whole
from flows.render.table import Table
from flows.sweep.plots import DifferencePlot, LawPlot
from infra.storage.files import writing
from nanochat_core.errors import ConfigError
from nanochat_core.job import write_json


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """The results of a sweep. The same results give the same bytes: it has no times."""

    name: str
    lead: str  # profile, settings and store
    pictures: Sequence[DifferencePlot | LawPlot]  # none if nothing was measured
    sentences: Sequence[str]
    table: Table
    footer: str
    tree: Mapping[str, Any]  # JSON values


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
    page = render(
        kind="Sweep",
        heading=report.name,
        lead=[report.lead],
        sections=[
            PageSection(charts=[(each.axis, each.caption, each) for each in report.pictures]),
            PageSection(title="What the numbers say", notes=report.sentences),
            PageSection(title="Models", table=report.table),
        ],
        footer=report.footer,
    )
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
