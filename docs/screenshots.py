"""Takes the pictures of the chat page and the report card in docs/images, in Chromium.

    python docs/screenshots.py MODEL_DIR REPORT

For example what `nanochat fetch tiny --to MODEL_DIR` and `nanochat fetch report@tiny --to DIR` have
written. Needs Playwright's Python package and a Chromium on the path. Answers are greedy, so that
the same model gives the same pictures.
"""

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
DESKTOP: Any = {"width": 1280, "height": 800}
PHONE: Any = {"width": 390, "height": 844}
NAME = "rl@tiny"  # what the folder that is served is called, and so the model on the page
EARLIER = ("What can you do?", "Can you spell flood?")
QUESTIONS = (
    *("Who are you?", "Can you spell street?", "How many e are in street?", "What is 15 - 3?"),
    *("Who was Newton?", "Thanks!"),
)


@contextlib.contextmanager
def serve(model: Path) -> Iterator[str]:
    """The address of a server of `model`, on a free port."""
    command = [sys.executable, "-m", "nanochat_core.server", str(model), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            line = next((line for line in server.stderr if "http://" in line), "")
            found = re.search(r"http://\S+", line)
            if found is None:
                raise SystemExit(f"the server did not start: {' '.join(command)}")
            yield found[0]
        finally:
            server.terminate()
            server.communicate()


def ask(page: Page, question: str) -> None:
    """Send a message and wait for the whole answer."""
    page.get_by_label("Message", exact=True).fill(question)
    page.keyboard.press("Enter")
    page.locator("article").last.get_by_role("button", name="Regenerate").wait_for()


def take(page: Page, name: str) -> None:
    """Save what the page shows."""
    page.mouse.move(640, 1)  # nothing is hovered
    page.screenshot(path=IMAGES / f"{name}.png", animations="disabled", caret="hide")


def open_page(browser: Browser, address: str, **options: Any) -> Page:
    """The page in a browser that has seen nothing, with greedy answers."""
    page = browser.new_context(**options).new_page()
    page.goto(address)
    page.get_by_text("This model has").wait_for()
    page.evaluate("localStorage.setItem('nanochat.settings', '{\"temperature\": 0}')")
    page.reload()
    page.get_by_text("This model has").wait_for()
    return page


def talk(page: Page) -> None:
    """Two conversations in the list, and one that is shown."""
    for question in EARLIER:
        ask(page, question)
        page.keyboard.press("Alt+n")
    for question in QUESTIONS:
        ask(page, question)


def take_chat(browser: Browser, address: str) -> None:
    """The chat page with its settings, and as a phone shows it."""
    page = open_page(browser, address, viewport=DESKTOP, color_scheme="light")
    talk(page)
    take(page, "chat-light")
    page.get_by_role("button", name="Settings").click()
    take(page, "chat-settings")
    page.context.close()
    phone: dict[str, Any] = {"viewport": PHONE, "is_mobile": True, "has_touch": True}
    page = open_page(browser, address, color_scheme="dark", **phone)
    talk(page)
    take(page, "chat-phone-dark")
    page.context.close()


def take_report(browser: Browser, page: Path) -> None:
    """The top of the report card, on a desktop and on a phone."""
    for name, viewport in (("report", DESKTOP), ("report-phone", PHONE)):
        context = browser.new_context(viewport=viewport, color_scheme="light")
        shown = context.new_page()
        shown.goto(page.resolve().as_uri())
        take(shown, name)
        context.close()


def main(arguments: list[str]) -> None:
    """Take the pictures of the model and the report card that are named."""
    parser = argparse.ArgumentParser(description="Take the pictures of chat page and report card.")
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="a chat model's directory")
    parser.add_argument("report", type=Path, metavar="REPORT", help="its report.html")
    given = parser.parse_args(arguments)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("there is no Chromium on the path")
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        named = Path(folder) / NAME
        shutil.copytree(given.model, named, ignore=shutil.ignore_patterns("optimizer*"))
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        with serve(named) as address:
            take_chat(browser, address)
        take_report(browser, given.report)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
