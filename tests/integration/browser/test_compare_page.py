"""The page of `nanochat compare --html`: several runs' curves and scores, opened from the disk."""

import random
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page

from flows.compare.score_table import Compared, page_of
from flows.render.charts import Chart
from flows.render.table import Cell
from flows.stages import PRETRAIN
from tests.support.browser.fixtures import PHONE, windows_of

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
