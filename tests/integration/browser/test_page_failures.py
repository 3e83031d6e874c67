"""What goes wrong is said in words, with a way on; nothing that was written is lost."""

from playwright.sync_api import Page, expect

from tests.support.browser.chat import answers, ask, begin, fill_storage, questions, send
from tests.support.browser.fixtures import NOT_LOADED, Complaints
from tests.support.browser.scripted_server import CUT, ScriptedServer, answer, event, refusal

REFUSALS = [
    (
        refusal(503, "too many wait", **{"retry-after": "5"}),
        "The server is busy. Try again in 5 seconds.",
    ),
    (refusal(400, "the last message is too long"), "The last message is too long."),
    (refusal(401, "no key"), "The server asks for its API key: load the page again"),
    (refusal(500, ""), "The server failed (status 500)."),
    ({"status": 502, "body": "<html>", "headers": {}}, "The server failed (status 502)."),
]


def test_a_refusal_is_shown_and_can_be_tried_again(page: Page, server: ScriptedServer):
    for reply, says in REFUSALS:
        server.asked.clear()
        server.replies.append(reply)
        send(page, "hello")
        expect(page.locator(".problem:visible")).to_contain_text(says)
        expect(page.get_by_role("status")).to_contain_text(says)
        page.get_by_role("button", name="Retry").click()
        expect(answers(page)).to_have_text(["You said: hello"])
        assert questions(page).all_inner_texts() == ["hello"]
        assert server.asked[0] == server.asked[1]
        page.keyboard.press("Control+Shift+N")


LOST = "The connection was lost before the answer was complete."
BROKEN = [  # what comes after the first half of an answer, and what is said
    *(([CUT], LOST), ([], LOST), ([b'data: {"tok'], LOST)),
    ([event(error="the engine stopped"), event(done=True)], "The engine stopped."),
    ([b"data: what?\n\n", event(done=True)], "something that this page cannot read"),
]


def test_a_stream_that_breaks_off_keeps_what_came(
    page: Page, server: ScriptedServer, complaints: Complaints
):
    complaints.expect("net::ERR_INCOMPLETE_CHUNKED_ENCODING")  # of the first
    for end, says in BROKEN:
        begin(page, server, "The first half", *end).set()
        expect(page.locator(".problem:visible")).to_contain_text(says)
        expect(answers(page)).to_have_text(["The first half"])
        page.reload()
        expect(page.locator(".problem:visible")).to_contain_text(says)
        page.get_by_role("button", name="Retry").click()
        expect(answers(page)).to_have_text(["You said: go"])
        expect(page.get_by_text("2 of 2")).to_be_visible()  # the first half is the other one
        page.keyboard.press("Control+Shift+N")


def test_a_server_that_is_gone_is_said_so(page: Page, complaints: Complaints):
    complaints.expect(NOT_LOADED)
    page.route("**/chat/completions", lambda route: route.abort("connectionrefused"))
    send(page, "hello")
    expect(page.locator(".problem:visible")).to_contain_text("The server cannot be reached.")
    page.unroute("**/chat/completions")
    page.get_by_role("button", name="Retry").click()
    expect(answers(page)).to_have_text(["You said: hello"])


def test_a_long_conversation_is_cut_to_what_the_server_takes_and_it_says_so(
    page: Page, server: ScriptedServer
):
    for number in range(5):
        server.replies.append(answer("x" * 7000, size=7000))
        ask(page, f"question {number}")
    sent = server.asked[-1]["messages"]
    assert sent[0]["content"] == "question 0"
    ask(page, "one more")
    sent = server.asked[-1]["messages"]
    assert sent[0] == {"role": "user", "content": "question 1"}
    assert sum(len(m["content"]) for m in sent) <= 32_000
    expect(page.get_by_text("The oldest 2 messages no longer fit")).to_be_visible()


def test_a_message_that_is_too_long_stays_in_the_box(page: Page, server: ScriptedServer):
    box = page.get_by_label("Message", exact=True)
    box.fill("x" * 8001)
    page.keyboard.press("Enter")
    expect(page.get_by_text("8,001 characters; a message has at most 8,000")).to_be_visible()
    assert len(box.input_value()) == 8001
    assert server.asked == []


def test_a_full_storage_is_said_once_and_the_page_keeps_working(page: Page, server: ScriptedServer):
    fill_storage(page)
    ask(page, "hello")
    expect(page.get_by_role("alert").get_by_text("no room left")).to_be_visible()
    page.get_by_role("button", name="Close", exact=True).click()
    expect(ask(page, "again")).to_have_text("You said: again")
    expect(page.get_by_role("alert")).to_be_hidden()
    page.keyboard.press("Control+Shift+N")
    ask(page, "other")
    page.locator("#list .title").last.click()  # it is there as long as the page is
    expect(answers(page)).to_have_text(["You said: hello", "You said: again"])
    page.evaluate(
        "Object.keys(localStorage).filter((key) => key.startsWith('fill'))"
        ".slice(0, 4).forEach((key) => localStorage.removeItem(key))"
    )
    page.get_by_role("button", name='Delete "other"').click()
    page.reload()  # the room that was made is used
    expect(answers(page)).to_have_text(["You said: hello", "You said: again"])


def test_a_browser_without_storage_can_chat(open_page, server: ScriptedServer):
    page = open_page()
    page.add_init_script("""
        const refuse = () => { throw new DOMException("denied", "SecurityError"); };
        for (const name of ["localStorage", "sessionStorage"])
            Object.defineProperty(window, name, {get: refuse});
    """)
    page.reload()
    expect(ask(page, "hello")).to_have_text("You said: hello")


def test_a_server_without_stats_is_fine(page: Page, server: ScriptedServer, complaints: Complaints):
    complaints.expect("status of 404")
    server.stats = None
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_have_text("nanochat")
    expect(ask(page, "hello")).to_have_text("You said: hello")
    assert server.asked[0]["temperature"] == 0.6
    while not complaints.heard:
        page.wait_for_timeout(20)  # its question for /stats was refused


def test_two_tabs_that_write_in_one_conversation_lose_nothing(page: Page, server: ScriptedServer):
    ask(page, "one")
    other = page.context.new_page()
    other.goto(page.url)
    expect(answers(other)).to_have_text(["You said: one"])
    more = begin(page, server, "slow", *answer(" end"), question="two")
    expect(answers(other)).to_have_text(["You said: one", "slow"])
    ask(other, "three")
    more.set()
    expect(answers(page).last).to_have_text("slow end")
    ask(other, "four")  # whatever this tab had seen of the slow answer
    expect(answers(page).last).to_have_text("You said: four")
    stored = page.evaluate(
        "JSON.parse(localStorage['nanochat.chat.' + location.hash.slice(1)]).messages"
    )
    asked = {message["content"] for message in stored if message["role"] == "user"}
    said = {
        "".join(part["text"] for part in message["parts"])
        for message in stored
        if message["role"] == "assistant" and message["state"] == "done"
    }
    assert asked == {"one", "two", "three", "four"}
    assert said == {"You said: one", "slow end", "You said: three", "You said: four"}


def test_what_two_tabs_write_at_once_is_all_kept(page: Page, server: ScriptedServer):
    """The tab that wrote last had not seen the other's: here what it overwrote is taken out."""
    ask(page, "one")
    ask(page, "two")
    other = page.context.new_page()
    other.goto(page.url)
    expect(answers(other)).to_have_text(["You said: one", "You said: two"])
    other.evaluate(
        """() => {
          const key = 'nanochat.chat.' + location.hash.slice(1);
          const tree = JSON.parse(localStorage[key]);
          tree.messages.splice(2);
          tree.leaf = tree.messages.at(-1).id;
          localStorage[key] = JSON.stringify(tree);
        }"""
    )
    expect(answers(other)).to_have_text(["You said: one", "You said: two"])  # of this one's event
    expect(answers(page)).to_have_text(["You said: one", "You said: two"])


def test_an_event_that_comes_late_hides_nothing(page: Page, server: ScriptedServer):
    """Another tab wrote before this one, and its event arrives after."""
    ask(page, "one")
    key = page.evaluate("'nanochat.chat.' + location.hash.slice(1)")
    before = page.evaluate("key => localStorage[key]", key)
    ask(page, "two")
    page.evaluate(
        "([key, newValue]) => dispatchEvent(new StorageEvent('storage', {key, newValue}))",
        [key, before],
    )
    expect(answers(page)).to_have_text(["You said: one", "You said: two"])


def test_an_answer_that_ends_while_the_page_might_be_left_is_over(
    page: Page, server: ScriptedServer
):
    more = begin(page, server, "first", *answer(" last"))
    page.evaluate("dispatchEvent(new Event('beforeunload'))")  # as a download does
    more.set()
    expect(answers(page)).to_have_text("first last")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    expect(ask(page, "again")).to_have_text("You said: again")


def test_deleting_a_conversation_stops_its_answer(page: Page, server: ScriptedServer):
    begin(page, server, "endless")
    page.get_by_role("button", name='Delete "go"').click()
    assert server.left.wait(100)
    expect(page.locator("#list li")).to_have_count(0)
    page.reload()
    expect(page.locator("#list li")).to_have_count(0)
