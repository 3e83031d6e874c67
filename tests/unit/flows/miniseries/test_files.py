"""The files of a series: whole, the same for the same findings, and with nothing from elsewhere."""

import json
import re
from pathlib import Path

import pytest

from flows.miniseries.findings import Findings, analyse
from flows.miniseries.picture import pictures
from flows.miniseries.points import Missing, runs_of
from flows.miniseries.report import report_of
from flows.sweep.files import write_files
from infra.storage.base import Store
from nanochat_core.errors import ConfigError
from tests.support.flows.measured_series import put_evaluated

BPB = {1: 3.0, 2: 2.6, 3: 2.45, 4: 2.3}


@pytest.fixture
def findings(store: Store) -> Findings:
    """Four depths of tiny, each with its interval."""
    for depth, bpb in BPB.items():
        put_evaluated(
            store, depth, bpb, metrics={"val_bpb_low": bpb - 0.1, "val_bpb_high": bpb + 0.1}
        )
    return analyse(store, runs_of(store, "tiny", list(BPB)), name="tiny", profile="tiny")


def test_all_three_are_written_and_nothing_else(findings: Findings, tmp_path: Path) -> None:
    files = write_files(tmp_path, report_of(findings))

    directory = tmp_path / "miniseries" / "tiny"
    assert sorted(path.name for path in directory.iterdir()) == [
        "series.html",
        "series.json",
        "series.png",
    ]
    assert files.picture is not None
    assert files.picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert json.loads(files.numbers.read_text())["name"] == "tiny"


def test_the_page_holds_all_that_it_shows(findings: Findings, tmp_path: Path) -> None:
    page = write_files(tmp_path, report_of(findings)).page.read_text()

    assert "default-src 'none'" in page
    assert not re.search(r"<(script|iframe|object|embed|form|link|base)\b|@import|url\(", page)
    assert page.count("<figure>") == 2
    for label in ("d1", "d2", "d3", "d4", "d5?"):
        assert f">{label}</text>" in page
    assert "an extrapolation" in page
    assert "2.6000 (2.5000 to 2.7000)" in page


@pytest.mark.usefixtures("drawn_anew")
def test_the_same_findings_give_the_same_bytes(findings: Findings, tmp_path: Path) -> None:
    one, other = (write_files(tmp_path / name, report_of(findings)) for name in ("one", "other"))

    assert one.page.read_bytes() == other.page.read_bytes()
    assert one.numbers.read_bytes() == other.numbers.read_bytes()
    assert one.picture is not None
    assert other.picture is not None
    assert one.picture.read_bytes() == other.picture.read_bytes()


def test_points_lie_in_the_picture_where_their_numbers_are(findings: Findings) -> None:
    drawing = pictures(findings)[0].svg()

    dots = re.findall(r'translate\(([\d.]+),([\d.]+)\)"[^>]*fill="var\(--ink\)', drawing)
    places = [(float(x), float(y)) for x, y in dots]
    circles = places[:4]
    assert [x for x, _ in circles] == sorted(x for x, _ in circles)
    assert [y for _, y in circles] == sorted(y for _, y in circles)  # down the page: less loss


def test_nothing_measured_is_a_page_without_a_picture(store: Store, tmp_path: Path) -> None:
    missing = {1: Missing(depth=1, why="it was not evaluated")}
    (tmp_path / "miniseries" / "tiny").mkdir(parents=True)
    (tmp_path / "miniseries" / "tiny" / "series.png").write_text("of earlier")

    files = write_files(tmp_path, report_of(analyse(store, missing, name="tiny", profile="tiny")))

    assert files.picture is None
    assert not (tmp_path / "miniseries" / "tiny" / "series.png").exists()
    assert "it was not evaluated" in files.page.read_text()


def test_foreign_text_is_not_taken_for_markup(store: Store, tmp_path: Path) -> None:
    missing = {1: Missing(depth=1, why="<script>alert(1)</script>\x1b[2J")}

    files = write_files(tmp_path, report_of(analyse(store, missing, name="tiny", profile="tiny")))

    page = files.page.read_text()
    assert "<script>" not in page
    assert "\x1b" not in page


def test_what_cannot_be_written_is_said_and_leaves_what_was_there(
    findings: Findings, tmp_path: Path
) -> None:
    (tmp_path / "miniseries").write_text("a file")

    with pytest.raises(ConfigError, match="cannot be written"):
        write_files(tmp_path, report_of(findings))
    assert (tmp_path / "miniseries").read_text() == "a file"
