"""Hostile texts on the chat page, in headless Chromium.

Each text is typed as a question and streamed back as its answer, then both are shown once more from
the browser's storage: four renderings. What gets through is a script that runs, an element or
attribute that has a use, a request to another origin, navigation, and a breach of the policy.
"""

from playwright.sync_api import BrowserContext, expect, sync_playwright

from tests.support.browser.chat import ask, questions
from tests.support.browser.chromium import launch
from tests.support.browser.fixtures import DESKTOP, PATIENCE, WATCH, Complaints, watch
from tests.support.browser.page_corpus import EVERYWHERE, harm, show_stored
from tests.support.browser.scripted_server import STATS, RunningServer, ScriptedServer, answer

TEXTS_A_CONVERSATION = 8
RENDERINGS = 4  # of each text
LETTERS = 7  # of a token, so that markup is cut in the middle


def run(texts: list[str] = EVERYWHERE, *, flaw: str = "") -> tuple[int, list[str]]:
    """Render the texts; return how many renderings there were, and a line for each that harmed.

    `flaw` is a script for a page without its policy, to see it found.
    """
    server = ScriptedServer()
    thread = RunningServer(server)
    expect.set_options(timeout=PATIENCE)
    through: list[str] = []
    try:
        with sync_playwright() as playwright:
            browser = launch(playwright)
            for first in range(0, len(texts), TEXTS_A_CONVERSATION):
                context = browser.new_context(viewport=DESKTOP, bypass_csp=bool(flaw))
                context.add_init_script(WATCH + flaw)
                through += _converse(context, server, texts[first : first + TEXTS_A_CONVERSATION])
                context.close()
            browser.close()
    finally:
        thread.close()
    return RENDERINGS * len(texts), through


def _converse(context: BrowserContext, server: ScriptedServer, texts: list[str]) -> list[str]:
    """Hold one conversation of these texts, then show it from the storage; return what harmed."""
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    complaints = Complaints()
    watch(page, server.url, complaints)
    loaded: list[str] = []  # the addresses of documents
    page.on("request", lambda r: loaded.append(r.url) if r.is_navigation_request() else None)
    page.goto(server.url)
    expect(page.locator("#model")).to_have_text(STATS["model"])
    for i, text in enumerate(texts):
        server.replies.append(answer(text, size=LETTERS))
        ask(page, text)
        if wrong := [*loaded[1:], *harm(page), *complaints.heard]:
            page.close()  # the next texts have a page that nothing has changed
            rest = _converse(context, server, texts[i + 1 :]) if texts[i + 1 :] else []
            return [f"{text!r}: {'; '.join(wrong)}", *rest]
    show_stored(page, texts)
    expect(questions(page)).to_have_count(len(texts))
    wrong = [*loaded[2:], *harm(page), *complaints.heard]  # of which a reload is ours
    return [f"{texts!r} from the storage: {'; '.join(wrong)}"] if wrong else []
