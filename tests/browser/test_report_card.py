"""The report card, opened from the disk: wide and narrow, light and dark, and on paper."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

from flows.profiles import open_profile
from tests.browser.conftest import DESKTOP, LIGHTNESS, OVERFLOW, PHONE
from tests.flows.reported import make_inputs, run_report

pytest.importorskip("vl_convert")

HOSTILE = "<script>alert(1)</script><img src='http://evil.example/x'> " + "wide" * 200
COLUMNS = "getComputedStyle(document.querySelector('.grid')).gridTemplateColumns.split(' ').length"


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything that a report card can have on it."""
    directory = tmp_path_factory.mktemp("report")
    mixture = '[{"task":"identity","num_examples":60,"epochs":4}]'
    run = open_profile("tiny", overrides=[f"sft.mixture={mixture}", "seed=3"]).run
    inputs = make_inputs(directory / "store", answer=HOSTILE, run=run)
    run_report(directory / "job", inputs)
    return directory / "job" / "output" / "report.html"


@pytest.fixture
def open_card(open_file: Callable[..., Page], card: Path) -> Callable[..., Page]:
    """Opens it: `open_card(viewport=..., color_scheme=...)`."""
    return functools.partial(open_file, card)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("window", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_card_fits_its_window(
    open_card: Callable[..., Page], window: dict[str, int], scheme: str
):
    page = open_card(viewport=window, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == window["width"]
    assert page.evaluate(OVERFLOW) == []
    assert page.evaluate(COLUMNS) == (2 if window == DESKTOP else 1)
    paper, ink = page.evaluate(LIGHTNESS)
    assert (paper > 200 and ink < 60) if scheme == "light" else (paper < 60 and ink > 200)


def test_everything_of_the_run_can_be_seen(open_card: Callable[..., Page]):
    page = open_card(viewport=DESKTOP)
    headings = page.locator("h2").all_inner_texts()
    assert headings == [
        *(
            "Scores",
            "CORE",
            "Learning",
            "The same prompts, model by model",
            "Rewarded samples of RL",
        ),
        *("Samples of the base model", "Vocabulary", "Stages", "Lineage", "Speed and machine"),
        "Reproduce",
    ]
    command = page.locator(".command")
    assert command.inner_text().splitlines()[0] == "nanochat run tiny \\"
    assert "--set seed=3" in command.inner_text()
    for drawing in page.locator("figure svg").all():
        box = drawing.bounding_box()
        assert box is not None
        assert min(box["width"], box["height"]) > 100
    # What the line of GPT-2 stands beside, in pixels: 0.2565 of the bar.
    bar, line = page.locator(".track .bar"), page.locator(".track u")
    width, at = bar.bounding_box(), line.bounding_box()
    assert width is not None
    assert at is not None
    assert (at["x"] + 1 - width["x"]) / width["width"] == pytest.approx(0.2565, abs=0.002)


def test_stops_are_drawn_where_training_went_on(open_card: Callable[..., Page]):
    page = open_card(viewport=DESKTOP)
    first = page.locator("figure").first
    assert "resumed from step 12 (stopped after 40)" in first.inner_text()
    assert first.locator("svg [stroke='var(--mark)']").count() == 3  # to 12 and 20, from 40


def test_on_paper_it_is_dark_on_white(open_card: Callable[..., Page]):
    page = open_card(viewport=DESKTOP, color_scheme="dark")
    page.emulate_media(media="print")
    paper, ink = page.evaluate(LIGHTNESS)
    assert paper == 255
    assert ink < 60
    bars = page.locator(".bar i").first
    assert bars.evaluate("e => getComputedStyle(e).printColorAdjust") == "exact"
    assert page.pdf(format="A4").startswith(b"%PDF")
