"""What an edit, a retry or a full storage must not break on the chat page."""

import threading

from playwright.sync_api import Page, expect

from tests.support.browser.chat import answers, ask, fill_storage, questions, send, titles
from tests.support.browser.fixtures import NOT_LOADED, Complaints
from tests.support.browser.scripted_server import ScriptedServer, event, refusal

USAGE = {"prompt_tokens": 1, "completion_tokens": 0, "seconds": 0.1, "finish_reason": "stop"}


def test_retry_of_an_earlier_failure_keeps_the_conversation(
    page: Page, server: ScriptedServer, complaints: Complaints
):
    complaints.expect(NOT_LOADED)
    server.replies.append(refusal(503, "busy"))
    send(page, "first")
    expect(page.get_by_role("button", name="Retry")).to_be_visible()
    ask(page, "second")
    assert titles(page) == ["first"]
    page.get_by_role("button", name="Retry").click()
    expect(answers(page).last).to_have_text("You said: first")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    assert titles(page) == ["first"]
    page.reload()
    assert titles(page) == ["first"]
    expect(questions(page)).to_have_text(["first"])


def test_regenerate_of_an_empty_answer_keeps_the_conversation(page: Page, server: ScriptedServer):
    server.replies.append([event(usage=USAGE), event(done=True)])
    send(page, "first")
    expect(page.get_by_text("The model said nothing.")).to_be_visible()
    ask(page, "second")
    ask(page, "third")
    page.locator("article.assistant").first.get_by_role("button", name="Regenerate").click()
    expect(answers(page).last).to_have_text("You said: first")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    page.reload()
    assert titles(page) == ["first"]


def test_room_made_is_used(page: Page, server: ScriptedServer):
    ask(page, "old")
    page.keyboard.press("Control+Shift+N")
    fill_storage(page)
    ask(page, "new")
    expect(page.get_by_role("alert").get_by_text("no room left")).to_be_visible()
    page.evaluate("() => { for (let i = 0; i < 4; i++) localStorage.removeItem('fill' + i); }")
    page.get_by_role("button", name='Delete "old"').click()
    page.reload()
    assert titles(page) == ["new"]


def test_a_message_can_be_sent_while_another_is_edited(page: Page, server: ScriptedServer):
    ask(page, "first")
    page.get_by_role("button", name="Edit").click()
    send(page, "next")
    expect(answers(page)).to_have_text(["You said: first", "You said: next"])
    assert [len(asked["messages"]) for asked in server.asked] == [1, 3]


def test_an_edited_question_waits_for_the_answer_that_is_being_written(
    page: Page, server: ScriptedServer
):
    ask(page, "first")
    page.get_by_role("button", name="Edit").click()
    more = threading.Event()
    server.replies.append([event(token="one"), more, event(token=" end"), event(done=True)])
    send(page, "next")
    expect(answers(page).last).to_have_text("one")
    page.get_by_label("Edit the message").fill("changed")
    page.keyboard.press("Enter")
    expect(page.locator("form.editor .meta")).to_contain_text("Escape stops it")
    assert len(server.asked) == 2
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_visible()
    more.set()
    page.get_by_label("Edit the message").press("Enter")
    expect(answers(page)).to_have_text(["You said: changed"])


def test_a_call_without_a_result_does_not_wait_for_one(page: Page, server: ScriptedServer):
    server.replies.append([event(tool_call="1/0"), event(token=" hm"), event(done=True)])
    expect(ask(page, "go")).to_have_text("calculator: 1/0 hm")


def test_a_question_of_another_tab_keeps_the_answer_that_was_taken_out_here(
    page: Page, server: ScriptedServer, complaints: Complaints
):
    """One tab retries a failed answer, and the other, which has not seen it, asks below it."""
    complaints.expect(NOT_LOADED)
    server.replies.append(refusal(503, "busy"))
    send(page, "first")
    expect(page.get_by_role("button", name="Retry")).to_be_visible()
    before = page.evaluate("localStorage['nanochat.chat.' + location.hash.slice(1)]")
    more = threading.Event()
    server.replies.append([event(token="slow"), more, event(token=" end"), event(done=True)])
    page.get_by_role("button", name="Retry").click()
    expect(answers(page).last).to_have_text("slow")
    page.evaluate(
        """(before) => {
          const tree = JSON.parse(before);
          tree.messages.push({...tree.messages[0], id: "other", parent: tree.leaf, content: "x"});
          localStorage["nanochat.chat." + location.hash.slice(1)] = JSON.stringify(tree);
        }""",
        before,
    )
    more.set()
    expect(answers(page).last).to_have_text("slow end")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    page.reload()
    assert titles(page) == ["first"]
