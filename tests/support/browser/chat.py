"""What a person sees and does on the chat page, in a word each."""

import threading

from playwright.sync_api import Locator, Page, expect

from tests.support.browser.scripted_server import ScriptedServer, Step, event


def send(page: Page, text: str) -> None:
    """Type a message and press Enter."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def ask(page: Page, text: str) -> Locator:
    """Send a message and wait for its whole answer; gives the answer's text."""
    send(page, text)
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    return answers(page).last


def begin(
    page: Page, server: ScriptedServer, text: str, *rest: Step, question: str = "go"
) -> threading.Event:
    """Ask, and wait until the answer begins with `text`; its rest comes once the event is set."""
    more = threading.Event()
    server.replies.append([event(token=text), more, *rest])
    send(page, question)
    expect(answers(page).last).to_have_text(text.strip())
    return more


def answers(page: Page) -> Locator:
    """The texts of the answers that are shown."""
    return page.locator("article.assistant .body")


def questions(page: Page) -> Locator:
    """The texts of the own messages that are shown."""
    return page.locator("article.user .bubble")


def titles(page: Page) -> list[str]:
    """The conversations in the list, from the top."""
    return page.locator("#list .title").all_inner_texts()


def fill_storage(page: Page) -> None:
    """Fill the browser's storage to the last byte, under keys that begin with `fill`."""
    page.evaluate("""() => {
        let text = "x".repeat(4 * 1024 * 1024);
        for (let i = 0; text; i++) {
            try { localStorage.setItem("fill" + i, text); }
            catch { text = text.slice(text.length / 2 + 1); }
        }
    }""")
