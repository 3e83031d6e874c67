"""Texts that a layout could search again and again; test_attacks.py has each hostile text."""

import time
from pathlib import Path

from playwright.sync_api import Browser, Page

from nanochat_core.server.page import page as page_module
from tests.support.browser.chat import ask
from tests.support.browser.page_corpus import harm
from tests.support.browser.scripted_server import ScriptedServer, answer

ENDLESS = [
    "*a ", "**", "[", "[a](", "`", "``a`", "> ", "- ", "_a ", "~~a", "| a |\n|-|\n", "https://a",
    "![", "\\", "#", "***a** *", "<a", "1. ", " ", "|", "-\n", "\ue0001\ue001",
]  # fmt: skip
FEW_ENDLESS = [("a|b\n", "-", "x"), ("[a](", " ", "x"), ("", "~", " `"), ("", "- a\n\n", "")]
# The page's names are its own: the file is run once more, with names that a test can reach.
DRAW = """([source, text]) => {
  const draw = new Function(source + "; return drawMarkdown")();
  const element = document.createElement("div");
  const before = performance.now();
  draw(element, text);
  return performance.now() - before;
}"""


def test_no_text_takes_long_to_lay_out(page: Page, server: ScriptedServer):
    texts = [(".", piece, "") for piece in ENDLESS] + FEW_ENDLESS
    for head, piece, tail in texts:
        text = head + piece * (16_000 // len(piece)) + tail
        server.replies.append(answer(text, size=len(text)))
        page.keyboard.press("Control+Shift+N")
        before = time.monotonic()
        ask(page, "go")
        assert time.monotonic() - before < 4.0
        assert harm(page) == []


def test_no_search_of_the_layout_starts_over(browser: Browser):
    source = (Path(page_module.__file__).parent / "markdown.js").read_text()
    page = browser.new_page()
    for head, piece, tail in FEW_ENDLESS:
        text = head + piece * (60_000 // len(piece)) + tail
        assert page.evaluate(DRAW, [source, text]) < 4_000  # milliseconds; 10 s or more if it does
    page.close()
