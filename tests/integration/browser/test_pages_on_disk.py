"""Pages opened from the disk: wide and narrow, light and dark, and the report card on paper."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

from flows.compare.score_table import Compared, page_of
from flows.profiles import open_profile
from flows.render.charts import Chart
from flows.render.table import Cell
from flows.stages import PRETRAIN
from tests.support.browser.fixtures import DESKTOP, LIGHTNESS, PHONE, windows_of
from tests.support.flows.reported import make_inputs, run_report

HOSTILE = "<script>alert(1)</script><img src='http://evil.example/x'> " + "wide" * 200
COLUMNS = "getComputedStyle(document.querySelector('.grid')).gridTemplateColumns.split(' ').length"


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything that a report card can have on it."""
    directory = tmp_path_factory.mktemp("report")
    run = open_profile("tiny", overrides=["seed=3"]).run  # so that its command has two lines
    run_report(directory / "job", make_inputs(directory / "store", answer=HOSTILE, run=run))
    return directory / "job" / "output" / "report.html"


FOLDED = [
    *("Kinds of turns", "Rewarded samples of RL", "Samples of the base model", "Vocabulary"),
    *("Stages", "Lineage", "Speed and machine"),
]


def test_the_card_fits_its_window(open_at: Callable[..., Page], card: Path):
    page = open_at(card.as_uri())
    for window in windows_of(page):
        assert page.evaluate(COLUMNS) == (2 if window == DESKTOP else 1)
    # On paper it is dark on white, also for who reads it light on dark.
    page.emulate_media(color_scheme="dark", media="print")
    paper, ink = page.evaluate(LIGHTNESS)
    assert paper == 255
    assert ink < 60
    bars = page.locator(".bar i").first
    assert bars.evaluate("e => getComputedStyle(e).printColorAdjust") == "exact"
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_everything_of_the_run_can_be_seen(open_at: Callable[..., Page], card: Path):
    page = open_at(card.as_uri())
    assert page.locator("summary").all_inner_texts() == FOLDED
    stages = page.locator("details", has_text="Stages").last
    assert not stages.locator("table").is_visible()
    stages.locator("summary").click()
    assert stages.locator("table").is_visible()
    page.emulate_media(media="print")  # paper cannot be clicked: it has everything
    assert all(body.is_visible() for body in page.locator("details table").all())
    page.emulate_media(media="screen")
    for drawing in page.locator("figure svg").all():
        box = drawing.bounding_box()
        assert box is not None
        assert min(box["width"], box["height"]) > 100
    # What the line of GPT-2 stands beside, in pixels: 0.2565 of the bar.
    bar, line = page.locator(".bar:has(u)"), page.locator(".bar u")
    width, at = bar.bounding_box(), line.bounding_box()
    assert width is not None
    assert at is not None
    assert (at["x"] + 1 - width["x"]) / width["width"] == pytest.approx(0.2565, abs=0.002)
    first = page.locator("figure").first  # stops are drawn where training went on
    assert "resumed from step 12 (stopped after 40)" in first.inner_text()
    assert first.locator("svg [stroke='var(--mark)']").count() == 3  # to 12 and 20, from 40


# The page of `nanochat compare --html`: several runs' curves and scores.

NAMES = ("main", "mine-20261121t150640z-0310", *(f"tiny-{i}" for i in range(6)))


def compared(path: Path) -> Path:
    """Write the page of eight runs, one of which never pretrained."""
    noise = random.Random(1)
    curves = [
        Chart(
            quantity=quantity,
            curves=[
                [(step, 5 / step + run / 9 + noise.random() / 5) for step in range(1, 90)]
                if run != 3
                else ()
                for run in range(len(NAMES))
            ],
        )
        for quantity in PRETRAIN.curves
    ]
    delta = Cell("+1.0 (-2.0 to +4.0) better", tone="better")
    value = Cell("25.0 % (20 to 30)")
    row = [Cell("SFT"), Cell("arithmetic"), value, *[value, delta] * len(NAMES[1:])]
    changes = {
        name: ["seed 0 -> 1", "model.windows [128, 256] -> [64, 64, 64]"] for name in NAMES[1:]
    }
    page = Compared(
        names=NAMES, changes=changes, scores=[row], others=[row], charts=curves, same=["shards"]
    )
    path.write_text(page_of(page), encoding="utf-8")
    return path


def test_the_page_fits_its_window_and_each_run_has_a_line_of_its_own(
    open_at: Callable[..., Page], tmp_path: Path
):
    page = open_at(compared(tmp_path / "page.html").as_uri())
    for window in windows_of(page):
        # Differences are what a reader looks for: a phone shows them without scrolling sideways.
        edges = page.locator("td.better").evaluate_all(
            "all => all.map((e) => e.getBoundingClientRect().right)"
        )
        assert window != PHONE or max(edges) <= PHONE["width"]
    keys = page.locator(".key i").evaluate_all(
        "all => all.map((e) => getComputedStyle(e).borderTopColor + getComputedStyle(e)"
        ".borderTopStyle)"
    )
    assert len(set(keys)) == len(NAMES)
    lines = page.locator("figure").first.locator("svg .mark-line path")
    drawn = lines.evaluate_all(
        "all => all.map((e) => getComputedStyle(e).stroke + "
        "(e.getAttribute('stroke-dasharray') || '').replace('1,0', ''))"
    )
    assert len(drawn) == len(set(drawn)) == len(NAMES) - 1  # one has no curve
