"""The system's Chromium on the chat page, which a scripted server serves.

Every test also fails on what no page may do: an error on the console, a breach of the content
security policy, a request to anywhere else.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Page,
    Request,
    expect,
    sync_playwright,
)

from tests.support.browser.chromium import NO_CHROMIUM, find_chromium, launch
from tests.support.browser.scripted_server import STATS, RunningServer, ScriptedServer


class Complaints:
    """What the browser complained about.

    A complaint may come long after its cause, so a test does not take out those that it expects: it
    names them beforehand.
    """

    def __init__(self) -> None:
        self.heard: list[str] = []
        self._expected: list[str] = []

    def expect(self, *parts: str) -> None:
        """Those with one of these parts are no mistake."""
        self._expected += parts

    @property
    def unexpected(self) -> list[str]:
        """The others."""
        return [t for t in self.heard if not any(part in t for part in self._expected)]


PATIENCE = 100_000  # milliseconds for what comes at once, unless the machine is busy
NOT_LOADED = "Failed to load resource"  # the browser's own line about a refusal or a broken stream
DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
# Policy breaches only reach the console of the page in some versions; the event always comes.
WATCH = """addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy: ${event.violatedDirective} ${event.blockedURI} ${event.sample}`));"""
# Before its scripts run, a page at this place has nothing in its storage, and is where all are.
FRESH = """if (location.hash === "#fresh") {
  localStorage.clear();
  sessionStorage.clear();
  history.replaceState(null, "", "/");
}"""

# What reaches out of the window, or out of its own cell; what is in a box that scrolls may. (Of a
# drawing the whole and its words: its groups count invisible joints of lines.)
_OVERFLOW = """[...document.querySelectorAll("body *")].filter((e) =>
  !(e instanceof SVGElement && !e.matches("svg, text")) &&
  (e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".wide") ||
   e.matches("th, td, pre, p, h1, dd") && e.scrollWidth > e.clientWidth + 1))
  .map((e) => e.outerHTML.slice(0, 80))"""
# Which way up a page is: how light its paper is, and its ink.
LIGHTNESS = """["backgroundColor", "color"].map((name) => getComputedStyle(document.body)[name]
  .match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 3)"""


def windows_of(page: Page) -> Iterator[dict[str, int]]:
    """Show a page in each window, light and dark; assert that it fits and is in those colours."""
    for window, scheme in itertools.product((PHONE, DESKTOP), ("dark", "light")):
        page.set_viewport_size(window)  # pyright: ignore[reportArgumentType]
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") == window["width"]
        assert page.evaluate(_OVERFLOW) == []
        paper, ink = page.evaluate(LIGHTNESS)
        assert (paper > 200 and ink < 60) if scheme == "light" else (paper < 60 and ink > 200)
        yield window


class Chromium:
    """One browser for all tests, and one page that one test after the other has to itself.

    While Playwright is there, its loop counts as running in this thread, and no test could start
    one of its own: so it counts as running within `used` alone.
    """

    def __init__(self) -> None:
        expect.set_options(timeout=PATIENCE)
        self._playwright = sync_playwright().start()
        self._loop = asyncio.get_running_loop()
        self.browser = launch(self._playwright)
        context = self.browser.new_context(viewport=DESKTOP)
        context.set_default_timeout(PATIENCE)
        context.add_init_script(WATCH)
        context.add_init_script(FRESH)
        self._page = context.new_page()
        asyncio._set_running_loop(None)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Playwright may be called within."""
        asyncio._set_running_loop(self._loop)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)

    @contextlib.contextmanager
    def visit(self, url: str, complaints: Complaints) -> Iterator[Page]:
        """The page, on a server, with nothing left of the test before; complaints fail the test."""
        page = self._page
        listeners = watch(page, url, complaints)
        page.goto(f"{url}/#fresh")
        yield page
        for other in page.context.pages:
            if other is not page:
                other.close()
        page.unroute_all()
        page.goto("about:blank")
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
        assert complaints.unexpected == []

    def close(self) -> None:
        """End the browser and the program that drives it."""
        with self.used():
            self.browser.close()
            self._playwright.stop()


@pytest.fixture(scope="session")
def started() -> Iterator[Chromium]:
    if find_chromium() is None:
        pytest.skip(NO_CHROMIUM)
    chromium = Chromium()
    yield chromium
    chromium.close()


@pytest.fixture
def chromium(started: Chromium) -> Iterator[Chromium]:
    with started.used():
        yield started


@pytest.fixture
def browser(chromium: Chromium) -> Browser:
    return chromium.browser


@pytest.fixture(scope="session")
def running() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    thread = RunningServer(server)
    yield server
    thread.close()


@pytest.fixture
def server(running: ScriptedServer, complaints: Complaints) -> ScriptedServer:
    """The server, with nothing left of the test before. The browser complains about refusals."""
    url = running.url
    running.__init__()
    running.url = url
    running.on_refusal = lambda: complaints.expect(NOT_LOADED)
    return running


@pytest.fixture
def complaints() -> Complaints:
    """What the browser complained about; a test that expects some says so."""
    return Complaints()


@pytest.fixture
def open_at(browser: Browser, complaints: Complaints) -> Iterator[Callable[..., Page]]:
    """Opens an address in a context of its own: `open_at(url, viewport=..., color_scheme=...)`.

    A context costs as much as a few tests: `page` does for a test that needs no other options.
    """
    with contextlib.ExitStack() as contexts:

        def open_it(url: str, **options: object) -> Page:
            context = browser.new_context(**{"viewport": DESKTOP, **options})
            contexts.callback(context.close)
            context.set_default_timeout(PATIENCE)
            context.add_init_script(WATCH)
            page = context.new_page()
            watch(page, url, complaints)
            page.goto(url)
            page.wait_for_load_state("networkidle")
            return page

        yield open_it
    assert complaints.unexpected == []


@pytest.fixture
def open_page(open_at: Callable[..., Page], server: ScriptedServer) -> Callable[..., Page]:
    """Opens the chat page: `open_page(viewport=..., color_scheme=...)`."""

    def open_it(**options: object) -> Page:
        page = open_at(server.url, **options)
        # What it sends depends on what the server said of itself; a person is slower than that.
        expect(page.locator("#model")).to_have_text(STATS["model"])
        return page

    return open_it


def watch(page: Page, url: str, complaints: Complaints) -> dict[str, Callable[..., None]]:
    """Write down what the browser complains about, and requests to elsewhere; the listeners."""

    def hear_console(message: ConsoleMessage) -> None:
        if message.type == "error":
            complaints.heard.append(message.text)

    def hear_request(request: Request) -> None:
        if not request.url.startswith((url, "data:")):
            complaints.heard.append(f"asked for {request.url}")

    listeners: dict[str, Callable[..., None]] = {
        "pageerror": lambda error: complaints.heard.append(f"exception: {error}"),
        "console": hear_console,
        "request": hear_request,
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    return listeners


@pytest.fixture
def page(chromium: Chromium, server: ScriptedServer, complaints: Complaints) -> Iterator[Page]:
    """The page in a window of a desktop."""
    with chromium.visit(server.url, complaints) as page:
        # What it sends depends on what the server said of itself; a person is slower than that.
        expect(page.locator("#model")).to_have_text(STATS["model"])
        yield page
