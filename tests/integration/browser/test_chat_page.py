"""What people do on the page: ask, watch, stop, edit, ask again, come back."""

import itertools
import threading

from playwright.sync_api import Page, expect

from tests.support.browser.chat import answers, ask, begin, questions, send, titles
from tests.support.browser.scripted_server import ScriptedServer, Step, answer, event, refusal


def test_a_message_is_sent_and_its_answer_shown(page: Page, server: ScriptedServer):
    expect(ask(page, "hello there")).to_have_text("You said: hello there")
    assert questions(page).all_inner_texts() == ["hello there"]
    assert page.get_by_label("Message", exact=True).input_value() == ""
    assert server.asked == [
        {
            "messages": [{"role": "user", "content": "hello there"}],
            "temperature": 0.8,
            "top_k": 50,
            "max_tokens": 256,
        }
    ]


def test_the_answer_grows_as_it_is_written(page: Page, server: ScriptedServer):
    more, end = threading.Event(), threading.Event()
    server.replies.append([event(token="one "), more, event(token="two"), end, *answer(" three")])
    send(page, "count")
    expect(answers(page)).to_have_text("one")
    expect(page.get_by_role("status")).to_have_text("The model is writing.")
    more.set()
    expect(answers(page)).to_have_text("one two")
    end.set()
    expect(answers(page)).to_have_text("one two three")
    expect(page.get_by_role("status")).to_have_text("one two three")  # screen readers hear it once


def test_events_and_letters_may_be_cut_anywhere(page: Page, server: ScriptedServer):
    text = "caf\u00e9 \U0001f600 \u4f60\u597d"
    whole = b": ping\r\n\r\n" + b"".join(s for s in answer(text, size=3) if isinstance(s, bytes))
    inside = ["\u00e9", "\U0001f600", "\u597d"]  # letters of several bytes
    cuts = [whole.index(letter.encode()) + 1 for letter in inside]
    cuts += [4, 9, whole.index(b"data") + 2, whole.index(b"}\n\n") + 2, len(whole) - 1]
    steps: list[Step] = []
    for start, end in itertools.pairwise(sorted({0, *cuts, len(whole)})):
        steps += [whole[start:end], 0.05]  # long enough to travel alone
    server.replies.append(steps)
    expect(ask(page, "cut")).to_have_text(text)


def test_the_page_follows_the_answer_unless_one_reads_further_up(
    page: Page, server: ScriptedServer
):
    more, end = threading.Event(), threading.Event()
    lines = [event(token=f"line {i}\n\n") for i in range(40)]
    server.replies.append([*lines, more, *lines, end, *answer("last")])
    send(page, "many")
    expect(page.get_by_text("line 39")).to_be_in_viewport()
    expect(page.get_by_role("button", name="Go to the newest message")).to_be_hidden()
    page.locator("#scroll").evaluate("main => main.scrollTo(0, 100)")
    more.set()
    expect(page.get_by_text("line 39")).to_have_count(2)
    end.set()
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    assert page.locator("#scroll").evaluate("main => main.scrollTop") == 100
    page.get_by_role("button", name="Go to the newest message").click()
    expect(page.get_by_text("last", exact=True)).to_be_in_viewport()


def test_text_that_was_selected_stays_selected_while_more_is_written(
    page: Page, server: ScriptedServer
):
    more, end = threading.Event(), threading.Event()
    server.replies.append([event(token="take this\n\nnext "), more, event(token="word"), end])
    send(page, "go")
    page.get_by_text("take this").dblclick(position={"x": 8, "y": 8})
    assert page.evaluate("getSelection().toString().trim()") == "take"
    more.set()
    expect(answers(page)).to_contain_text("next word")
    assert page.evaluate("getSelection().toString().trim()") == "take"
    end.set()


def test_a_stopped_answer_stays_and_the_server_is_notified(page: Page, server: ScriptedServer):
    begin(page, server, "It was a dark and")
    page.get_by_role("button", name="Stop", exact=True).click()
    assert server.left.wait(100)
    expect(page.get_by_text("Stopped.", exact=True).last).to_be_visible()
    expect(answers(page)).to_have_text("It was a dark and")
    ask(page, "go on")
    assert server.asked[1]["messages"][1]["content"] == "It was a dark and"


def test_an_edited_message_begins_a_branch_and_the_old_one_is_kept(
    page: Page, server: ScriptedServer
):
    ask(page, "one")
    ask(page, "two")
    first = page.locator("article.user").first
    first.hover()
    first.get_by_role("button", name="Edit").click()
    editor = page.get_by_label("Edit the message")
    assert editor.input_value() == "one"
    editor.fill("uno")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text(["You said: uno"])
    assert [m["content"] for m in server.asked[2]["messages"]] == ["uno"]
    page.get_by_role("button", name="Previous question").click()
    expect(questions(page)).to_have_text(["one", "two"])
    expect(answers(page)).to_have_text(["You said: one", "You said: two"])


def test_escape_leaves_a_message_as_it_was(page: Page, server: ScriptedServer):
    ask(page, "one")
    page.keyboard.press("ArrowUp")
    expect(page.get_by_label("Edit the message")).to_be_focused()
    page.keyboard.type(" more")
    page.keyboard.press("Escape")
    expect(questions(page)).to_have_text(["one"])
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    assert len(server.asked) == 1


def test_another_answer_stands_beside_the_first(page: Page, server: ScriptedServer):
    server.replies.extend([answer("heads"), answer("tails")])
    ask(page, "toss")
    page.get_by_role("button", name="Regenerate").click()
    expect(answers(page)).to_have_text(["tails"])
    assert server.asked[0] == server.asked[1]
    expect(page.get_by_text("2 of 2")).to_be_visible()
    page.get_by_role("button", name="Previous answer").click()
    expect(answers(page)).to_have_text(["heads"])
    ask(page, "and now")
    said = [(message["role"], message["content"]) for message in server.asked[2]["messages"]]
    assert said == [("user", "toss"), ("assistant", "heads"), ("user", "and now")]


def test_a_reload_in_the_middle_keeps_what_was_written(page: Page, server: ScriptedServer):
    begin(page, server, "half an")
    page.reload()
    expect(answers(page)).to_have_text("half an")
    expect(page.get_by_text("The page was closed while this was being written.")).to_be_visible()


def test_conversations_are_listed_opened_renamed_and_deleted_and_deleting_is_undone(
    page: Page, server: ScriptedServer
):
    ask(page, "first question")
    page.keyboard.press("Control+Shift+N")
    expect(answers(page)).to_have_count(0)
    ask(page, "second question")
    assert titles(page) == ["second question", "first question"]
    page.get_by_role("button", name="first question", exact=True).click()
    expect(questions(page)).to_have_text(["first question"])

    page.get_by_role("button", name='Rename "first question"').click()
    page.get_by_label("Name of the conversation").fill("better name")
    page.keyboard.press("Enter")
    assert titles(page) == ["second question", "better name"]

    page.get_by_role("button", name='Delete "better name"').click()
    assert titles(page) == ["second question"]
    page.get_by_role("button", name="Undo").click()
    assert titles(page) == ["second question", "better name"]
    page.get_by_label("Message", exact=True).fill("half a thou")
    page.reload()
    assert page.get_by_label("Message", exact=True).input_value() == "half a thou"
    expect(questions(page)).to_have_text(["first question"])
    expect(answers(page)).to_have_text(["You said: first question"])
    assert titles(page) == ["second question", "better name"]


def test_an_answer_continues_while_another_conversation_is_shown(
    page: Page, server: ScriptedServer
):
    more = begin(page, server, "slow ", *answer("but sure"), question="first")
    page.keyboard.press("Alt+n")
    expect(ask(page, "second")).to_have_text("You said: second")
    more.set()
    page.get_by_role("button", name="first", exact=True).click()
    expect(answers(page)).to_have_text("slow but sure")


def test_calls_are_shown_as_they_happen_and_the_marker_of_a_final_number_is_for_the_model(
    page: Page, server: ScriptedServer
):
    gate = threading.Event()
    steps = [event(token="It is "), event(tool_call="12*3"), gate, event(tool_result="36")]
    server.replies.append([*steps, event(token="", marker="#### "), *answer("36 indeed")])
    send(page, "12 times 3")
    expect(page.locator(".call")).to_have_text("calculator: 12*3 = \u2026")
    gate.set()
    shown = "It is calculator: 12*3 = 36\n36 indeed"  # the number is a line of its own
    expect(answers(page)).to_have_text(shown, use_inner_text=True)
    page.reload()
    expect(answers(page)).to_have_text(shown, use_inner_text=True)
    ask(page, "thanks")
    assert server.asked[1]["messages"][1]["content"] == "It is <<12*3=36>>#### 36 indeed"


def test_tokens_and_speed_are_shown_and_the_servers_numbers_win(page: Page, server: ScriptedServer):
    usage = {"completion_tokens": 120, "seconds": 2.5, "finish_reason": "length"}
    server.replies.append(answer("many words", **usage))
    ask(page, "go")
    expect(page.locator("article.assistant .meta")).to_have_text(
        "120 tokens \u00b7 48 tokens/s \u00b7 2.5 s \u00b7 cut at the length limit"
    )


def test_the_page_says_plainly_what_a_tiny_model_is(page: Page):
    expect(page.get_by_text("This model has 1.9 M parameters, very few:")).to_be_visible()
    expect(page.get_by_role("heading", level=1)).to_have_text("sft@tiny")
    ask(page, "hello")
    page.get_by_role("button", name="1.9 M parameters").click()
    expect(page.get_by_role("alert").get_by_text("Do not rely on its answers")).to_be_visible()


def test_it_is_used_without_a_mouse(page: Page, server: ScriptedServer):
    box = page.get_by_label("Message", exact=True)
    expect(box).to_be_focused()
    page.keyboard.type("two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text("You said: two lines", use_inner_text=True)
    assert server.asked[0]["messages"][0]["content"] == "two\nlines"
    expect(box).to_be_focused()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Control+A")
    page.keyboard.type("one line")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text("You said: one line")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    page.keyboard.press("Shift+Tab")  # to what stands before the message box: the answer's buttons
    expect(page.get_by_role("button", name="Regenerate")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Previous answer")).to_be_visible()
    page.keyboard.press("Control+Shift+N")
    expect(box).to_be_focused()
    expect(page.get_by_role("heading", level=2, name="Ask something")).to_be_visible()


def test_code_and_answers_can_be_copied(open_page, server: ScriptedServer):
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    server.replies.append(answer("Look:\n\n```python\nif x < 3:\n    print('\u00e9')\n```\n"))
    ask(page, "code")
    page.locator("figure.code").get_by_role("button", name="Copy").click()
    expect(page.locator("figure.code").get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "if x < 3:\n    print('\u00e9')"
    page.locator("article.assistant .foot").get_by_role("button", name="Copy").click()
    expect(page.get_by_role("status")).to_have_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()").startswith("Look:\n\n```python")


# What an edit or a retry must not break.


def test_retry_of_an_earlier_failure_keeps_the_conversation(page: Page, server: ScriptedServer):
    server.replies.append(refusal(503, "busy"))
    send(page, "first")
    expect(page.get_by_role("button", name="Retry")).to_be_visible()
    ask(page, "second")  # the question without an answer is shown and not sent again
    expect(questions(page)).to_have_text(["first", "second"])
    assert [m["content"] for m in server.asked[1]["messages"]] == ["second"]
    assert titles(page) == ["first"]
    page.get_by_role("button", name="Retry").click()
    expect(answers(page).last).to_have_text("You said: first")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    assert titles(page) == ["first"]
    page.reload()
    assert titles(page) == ["first"]
    expect(questions(page)).to_have_text(["first"])


def test_regenerate_of_an_empty_answer_keeps_the_conversation(page: Page, server: ScriptedServer):
    server.replies.append(answer(""))
    send(page, "first")
    expect(page.get_by_text("The model said nothing.")).to_be_visible()
    ask(page, "second")
    ask(page, "third")
    page.locator("article.assistant").first.get_by_role("button", name="Regenerate").click()
    expect(answers(page).last).to_have_text("You said: first")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    page.reload()
    assert titles(page) == ["first"]


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
    more = begin(page, server, "one", *answer(" end"), question="next")
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
    page: Page, server: ScriptedServer
):
    """One tab retries a failed answer, and the other, which has not seen it, asks below it."""
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
