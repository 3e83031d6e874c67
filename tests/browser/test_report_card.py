"""The report card, opened from the disk: wide and narrow, light and dark, and on paper."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page

from flows.profiles import open_profile
from tests.browser.conftest import DESKTOP, PHONE, WATCH
from tests.flows.reported import make_inputs, run_report

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

HOSTILE = "<script>alert(1)</script><img src='http://evil.example/x'> " + "wide" * 200
COLUMNS = "getComputedStyle(document.querySelector('.grid')).gridTemplateColumns.split(' ').length"
# What reaches out of the window, or out of its own cell. (Of a drawing the whole and its words: its
# groups count invisible joints of lines.)
OVERFLOW = """[...document.querySelectorAll("body *")].filter((e) =>
  !(e instanceof SVGElement && !e.matches("svg, text")) &&
  (e.getBoundingClientRect().right > innerWidth + 1 || e.matches("th, td, pre, p, h1, dd") &&
   e.scrollWidth > e.clientWidth + 1)).map((e) => e.outerHTML.slice(0, 80))"""
# Which way up the page is: how light its paper is, and its ink.
LIGHTNESS = """["backgroundColor", "color"].map((name) => getComputedStyle(document.body)[name]
  .match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 3)"""


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
def open_card(browser: Browser, card: Path, complaints: list[str]) -> Iterator[Callable[..., Page]]:
    """Opens the page from its file: `open_card(viewport=..., color_scheme=...)`."""
    contexts: list[BrowserContext] = []

    def open_it(**options: object) -> Page:
        context = browser.new_context(**options)  # pyright: ignore[reportArgumentType]
        contexts.append(context)
        context.add_init_script(WATCH)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(f"exception: {error}"))
        page.on("console", lambda message: complaints.append(message.text))
        page.on(
            "request",
            lambda request: (
                None
                if request.url == card.as_uri()
                else complaints.append(f"asked for {request.url}")
            ),
        )
        page.goto(card.as_uri())
        page.wait_for_load_state("networkidle")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert complaints == []


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
        *("Scores", "CORE", "Learning", "The same prompts, model by model", "What RL paid for"),
        *("The base model goes on", "Vocabulary", "Stages", "Lineage", "Speed and machine"),
        "The same again",
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
    assert "went on from step 12 (stopped after 40)" in first.inner_text()
    assert first.locator("svg [stroke='var(--mark)']").count() == 3  # to 12 and 20, from 40


def test_on_paper_it_is_dark_on_white(open_card: Callable[..., Page]):
    page = open_card(viewport=DESKTOP, color_scheme="dark")
    page.emulate_media(media="print")
    paper, ink = page.evaluate(LIGHTNESS)
    assert paper == 255
    assert ink < 60
    assert page.pdf(format="A4").startswith(b"%PDF")
