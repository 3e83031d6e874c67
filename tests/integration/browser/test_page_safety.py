"""Whatever a model or a person writes: it is shown as text, nothing of it runs or is fetched."""

import re
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from nanochat_core.server.page import page as page_module
from tests.support.browser.chat import ask, questions, send
from tests.support.browser.fixtures import Complaints
from tests.support.browser.page_corpus import EVERYWHERE, HOSTILE, harm, show_stored
from tests.support.browser.scripted_server import ScriptedServer, answer, event
from tests.support.transcripts import Transcript


def test_hostile_text_is_inert_in_every_message(page: Page, server: ScriptedServer):
    everything = "\n\n".join(HOSTILE)
    server.replies.append(answer(everything, size=7))
    ask(page, everything)
    assert questions(page).last.text_content() == everything
    assert harm(page) == []
    page.reload()
    assert questions(page).last.text_content() == everything
    assert harm(page) == []


def test_every_hostile_text_is_inert_in_every_place_of_a_text(page: Page):
    assert len(EVERYWHERE) >= 200
    show_stored(page, EVERYWHERE)
    expect(questions(page)).to_have_count(len(EVERYWHERE))
    assert questions(page).all_text_contents() == EVERYWHERE
    assert harm(page) == []


def test_elements_and_scripts_of_an_answer_would_be_seen(page: Page):
    """The control of `harm`: an answer that the page does not show as text."""
    show_stored(page, ["hello"])  # an answer that is being written would be drawn again
    expect(questions(page)).to_have_count(1)
    page.evaluate("""() => {
        const [link, image] = ["a", "img"].map((tag) => document.createElement(tag));
        link.href = "javascript:window.hit=1";
        image.setAttribute("onx", "");
        document.querySelector("article.assistant .body").append(link, image);
        window.hit = 1;
    }""")
    link, image = "link to javascript:window.hit=1", "attributes ['onx'] of IMG"
    assert harm(page) == [link, "element IMG", image, "a script ran"]


def test_hostile_calls_titles_and_errors_are_inert(page: Page, server: ScriptedServer):
    bad = "<img src=x onerror=window.hit=1>"
    server.stats = {
        "model": bad,
        "parameters": bad,
        "defaults": {"temperature": bad},
        "limits": bad,
    }
    page.reload()
    server.replies.append([event(tool_call=bad), event(tool_result=bad), *answer("x")])
    ask(page, bad)
    expect(page.locator(".call").last).to_have_text(f"calculator: {bad} = {bad}")
    server.replies.append([b'data: {"error": "<img src=x onerror=window.hit=1>"}\n\n'])
    send(page, "y")
    expect(page.locator(".problem:visible")).to_contain_text("<img src=x")
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hit") is None


NO_CONVERSATIONS = (
    "not json",
    "null",
    '{"v": 1}',
    '{"v": 2, "id": "x", "title": "", "updated": 1, "leaf": null, "messages": []}',
    '{"v":1,"id":"x","title":"t","updated":1,"leaf":"a","messages":'
    '[{"id":"a","parent":"a","role":"user","content":"circle"}]}',
    '{"v":1,"id":"x","title":"t","updated":1,"leaf":"a","messages":'
    '[{"id":"a","parent":null,"role":"assistant","parts":[{"html":"<b>"}]}]}',
    '{"v":1,"id":"x","title":"t","updated":1,"leaf":"b","messages":[]}',
)


def test_what_is_no_conversation_in_the_storage_is_passed_over(page: Page):
    for stored in NO_CONVERSATIONS:
        page.evaluate("localStorage.clear()")
        page.evaluate("stored => localStorage.setItem('nanochat.chat.x', stored)", stored)
        page.evaluate("localStorage.setItem('nanochat.settings', '{\"temperature\": \"<b>\"}')")
        page.goto(page.url.split("#")[0] + "#x")
        page.reload()
        expect(ask(page, "hello")).to_have_text("You said: hello")
        assert page.evaluate("localStorage.getItem('nanochat.chat.x')") == stored


def test_the_browser_itself_refuses_foreign_script(page: Page, complaints: Complaints):
    complaints.expect("policy: ", "Content Security Policy", "has been blocked")
    page.evaluate("""() => {
        const script = document.createElement("script");
        try { script.text = "window.hit = 1"; document.body.append(script); } catch {}
        const image = "<img src=x onerror=window.hit=1>";
        try { document.body.insertAdjacentHTML("beforeend", image); } catch {}
    }""")
    assert page.evaluate("window.hit") is None
    assert page.locator("img").count() == 0
    while not complaints.heard:
        page.wait_for_timeout(20)  # it comes, or the test takes too long


MARKDOWN = """\
# Title

Text with **bold**, *italic*, ***both***, ~~gone~~, `code *as is*`, 2 * 3 * 4, snake_case_name,
a [link](https://example.com/a_(b)) and https://example.com/x. And \\*escaped\\*.

1. one
2. two
   - nested **strong**
   - more

     a paragraph

- [ ] not a box

> quoted
> > twice

| left | right |
|:-----|------:|
| a \\| b | 1 |

---

~~~
check_lease `in` tildes
~~~
"""


def test_markdown_is_laid_out(page: Page, server: ScriptedServer, transcript: Transcript):
    server.replies.append(answer(MARKDOWN))
    html = ask(page, "show").inner_html()
    transcript.check(MARKDOWN.splitlines()[0], re.sub(r"(?<=>)(?=<[a-z])", "\n", html))


# Texts that a layout could search again and again.
ENDLESS = [
    "*a ", "**", "[", "[a](", "`", "``a`", "> ", "- ", "_a ", "~~a", "| a |\n|-|\n", "https://a",
    "![", "\\", "#", "***a** *", "<a", "1. ", " ", "|", "-\n", "\ue0001\ue001",
]  # fmt: skip
TEXTS = [
    *((".", piece, "") for piece in ENDLESS),
    *(("a|b\n", "-", "x"), ("[a](", " ", "x"), ("", "~", " `"), ("", "- a\n\n", "")),
]
# The page's names are its own: the file is run once more, with names that a test can reach.
DRAW = """([source, text]) => {
  const draw = new Function(source + "; return drawMarkdown")();
  const element = document.createElement("div");
  const before = performance.now();
  draw(element, text);
  return performance.now() - before;
}"""


def test_no_search_of_the_layout_starts_over(browser: Browser):
    source = (Path(page_module.__file__).parent / "markdown.js").read_text()
    page = browser.new_page()
    for head, piece, tail in TEXTS:
        text = head + piece * (60_000 // len(piece)) + tail
        assert page.evaluate(DRAW, [source, text]) < 4_000  # milliseconds; 10 s or more if it does
    page.close()
