"""The report of a sweep, and its files in a home: a page, a picture, numbers for programs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.render.page import Page, Section, write_whole
from flows.render.table import Table
from flows.render.vega import picture
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


def write_files(home: Path, report: SweepReport) -> Path:
    """Write the files to HOME/sweep/NAME, each atomically, replacing older ones; return the page.

    The numbers are next to it, as .json, and so is the picture, as .svg, if anything was measured.
    Raises ConfigError if this machine cannot draw, or cannot write there.
    """
    directory = home / "sweep" / report.name
    content = Page(
        kind="Sweep",
        heading=report.name,
        lead=[report.lead],
        sections=[
            Section(charts=[(each.axis, each.caption, "", each) for each in report.pictures]),
            Section(title="What the numbers say", items=report.sentences),
            Section(title="Models", table=report.table),
        ],
        footer=report.footer,
    ).html
    # Everything is rendered before the first write: a failure leaves the older files as they were.
    drawing = picture(report.pictures[:1]) if report.pictures else None
    page = directory / "sweep.html"
    with writing(directory, ConfigError):
        directory.mkdir(parents=True, exist_ok=True)
        write_json(page.with_suffix(".json"), report.tree)
        write_whole(page, content.encode())
        if drawing:
            write_whole(page.with_suffix(".svg"), drawing.encode())
        else:
            # One of an earlier run would show points that are not in the page.
            page.with_suffix(".svg").unlink(missing_ok=True)
    return page
