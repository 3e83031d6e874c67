"""What a person sees and does on the chat page, in a word each."""

from playwright.sync_api import Locator, Page, expect


def send(page: Page, text: str) -> None:
    """Type a message and press Enter."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def ask(page: Page, text: str) -> Locator:
    """Send a message and wait for its whole answer; gives the answer's text."""
    send(page, text)
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    return answers(page).last


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
