"""The system's Chromium on the chat page, which a scripted server serves.

Every test also fails on what no page may do: an error on the console, a breach of the content
security policy, a request to anywhere else.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, expect, sync_playwright

from tests.browser.chromium import NO_CHROMIUM, find_chromium, launch
from tests.browser.scripted_server import STATS, RunningServer, ScriptedServer


class HasUrl(Protocol):
    """A server that is reached."""

    @property
    def url(self) -> str: ...


class Complaints:
    """What the browser complained about.

    A complaint may come long after its cause, so a test does not take out those that it expects: it
    names them beforehand.
    """

    def __init__(self) -> None:
        self.heard: list[str] = []
        self._expected: list[str] = []

    def hear(self, text: str) -> None:
        """One more."""
        self.heard.append(text)

    def expect(self, *parts: str) -> None:
        """Those with one of these parts are no mistake."""
        self._expected += parts

    @property
    def unexpected(self) -> list[str]:
        """The others."""
        return [t for t in self.heard if not any(part in t for part in self._expected)]


PATIENCE = 20_000  # milliseconds for what comes at once, unless the machine is busy
NOT_LOADED = "Failed to load resource"  # the browser's own line about a refusal or a broken stream
DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
# Policy breaches only reach the console of the page in some versions; the event always comes.
WATCH = """addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy: ${event.violatedDirective} ${event.blockedURI} ${event.sample}`));"""

# What reaches out of the window, or out of its own cell; what is in a box that scrolls may. (Of a
# drawing the whole and its words: its groups count invisible joints of lines.)
OVERFLOW = """[...document.querySelectorAll("body *")].filter((e) =>
  !(e instanceof SVGElement && !e.matches("svg, text")) &&
  (e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".wide") ||
   e.matches("th, td, pre, p, h1, dd") && e.scrollWidth > e.clientWidth + 1))
  .map((e) => e.outerHTML.slice(0, 80))"""
# Which way up a page is: how light its paper is, and its ink.
LIGHTNESS = """["backgroundColor", "color"].map((name) => getComputedStyle(document.body)[name]
  .match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 3)"""


# Of a module, not of the session: while Playwright is there, a loop counts as running in this
# thread, and no test could start one of its own.
@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        yield playwright


@pytest.fixture(scope="module")
def browser(playwright: Playwright) -> Iterator[Browser]:
    """One browser for the tests of a file: starting it takes longer than a test."""
    if find_chromium() is None:
        pytest.skip(NO_CHROMIUM)
    browser = launch(playwright)
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def running() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    thread = RunningServer(server)
    yield server
    thread.close()


@pytest.fixture
def server(running: ScriptedServer) -> ScriptedServer:
    """The server, with nothing left of the test before."""
    url = running.url
    running.__init__()
    running.url = url
    return running


@pytest.fixture
def complaints() -> Complaints:
    """What the browser complained about; a test that expects some says so."""
    return Complaints()


@pytest.fixture
def open_page(
    browser: Browser, server: ScriptedServer, complaints: Complaints
) -> Iterator[Callable[..., Page]]:
    """Opens the page in a context of its own: `open_page(viewport=..., color_scheme=...)`."""
    contexts: list[BrowserContext] = []

    def open_it(**options: object) -> Page:
        context = browser.new_context(**{"viewport": DESKTOP, **options})
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        context.add_init_script(WATCH)
        page = context.new_page()
        watch(page, server, complaints)
        page.goto(server.url)
        # What it sends depends on what the server said of itself; a person is slower than that.
        expect(page.locator("#model")).to_have_text(STATS["model"])
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert complaints.unexpected == []


def watch(page: Page, server: HasUrl, complaints: Complaints) -> None:
    """Write down what the browser complains about, and requests to elsewhere."""
    page.on("pageerror", lambda error: complaints.hear(f"exception: {error}"))
    page.on("console", lambda m: complaints.hear(m.text) if m.type == "error" else None)
    page.on(
        "request",
        lambda request: (
            None
            if request.url.startswith((server.url, "data:"))
            else complaints.hear(f"asked for {request.url}")
        ),
    )


@pytest.fixture
def page(open_page: Callable[..., Page]) -> Page:
    """The page in a window of a desktop."""
    return open_page()


@pytest.fixture
def open_file(browser: Browser, complaints: Complaints) -> Iterator[Callable[..., Page]]:
    """Opens a page from the disk: `open_file(path, viewport=..., color_scheme=...)`.

    Whatever is on its console is a complaint, and whatever it asks for beside itself.
    """
    contexts: list[BrowserContext] = []

    def open_it(path: Path, **options: object) -> Page:
        context = browser.new_context(**options)  # pyright: ignore[reportArgumentType]
        contexts.append(context)
        context.add_init_script(WATCH)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.hear(f"exception: {error}"))
        page.on("console", lambda message: complaints.hear(message.text))
        page.on(
            "request",
            lambda request: (
                None
                if request.url == path.as_uri()
                else complaints.hear(f"asked for {request.url}")
            ),
        )
        page.goto(path.as_uri())
        page.wait_for_load_state("networkidle")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert complaints.unexpected == []
