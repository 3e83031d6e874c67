"""The files of a series in a home: a page for people, a picture, numbers for programs."""

from dataclasses import dataclass
from pathlib import Path

from flows.miniseries.findings import HEADER, Findings, rows, sentences, to_tree
from flows.miniseries.picture import pictures
from flows.render.html import fill, write_whole
from infra.storage.files import writing
from nanochat_core.errors import ConfigError
from nanochat_core.job import write_json

TEMPLATE = Path(__file__).with_name("series.html.jinja")


@dataclass(frozen=True, kw_only=True)
class Files:
    """The paths of the files."""

    page: Path
    picture: Path | None  # None: nothing was measured
    numbers: Path


def write_files(home: Path, findings: Findings) -> Files:
    """Write the files to HOME/miniseries/NAME, each atomically, replacing older ones.

    Raises ConfigError if this machine cannot draw, or cannot write there.
    """
    directory = home / "miniseries" / findings.name
    drawn = pictures(findings)
    page = fill(
        TEMPLATE,
        findings=findings,
        pictures=drawn,
        sentences=list(sentences(findings)),
        rows=list(rows(findings)),
        header=HEADER,
    )
    # Everything is rendered before the first write: a failure leaves the older files as they were.
    picture = drawn[0].png() if findings.points else None
    files = Files(
        page=directory / "series.html",
        picture=directory / "series.png" if picture else None,
        numbers=directory / "series.json",
    )
    with writing(directory, ConfigError):
        directory.mkdir(parents=True, exist_ok=True)
        write_json(files.numbers, to_tree(findings))
        write_whole(files.page, page.encode())
        if files.picture and picture:
            write_whole(files.picture, picture)
        else:
            # One of an earlier run would show points that are not in the page.
            (directory / "series.png").unlink(missing_ok=True)
    return files
