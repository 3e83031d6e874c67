"""Settings, and the commands that begin with a slash."""

from playwright.sync_api import Page, expect

from tests.support.browser.chat import ask, send
from tests.support.browser.scripted_server import ScriptedServer


def note(page: Page) -> str:
    return page.locator(".note").last.inner_text()


def test_commands_change_what_is_asked_for(page: Page, server: ScriptedServer):
    for line, says in [
        ("/temperature 0.2", "temperature 0.2"),
        ("/topk 7", "top k 7"),
        ("/topk", "top k 7"),
        ("/maxtokens 33", "max tokens 33"),
        ("/seed 5", "seed 5"),
    ]:
        send(page, line)
        assert note(page) == says
    ask(page, "hello")
    settings = {"temperature": 0.2, "top_k": 7, "max_tokens": 33, "seed": 5}
    assert server.asked[0] | settings == server.asked[0]
    page.reload()
    send(page, "/seed random")
    assert note(page) == "seed random"
    ask(page, "again")
    assert server.asked[1]["temperature"] == 0.2
    assert "seed" not in server.asked[1]


def test_a_command_that_cannot_be_stays_to_be_mended(page: Page, server: ScriptedServer):
    for line, says in [
        ("/temperature 3", "'3' is not possible: temperature is a number from 0 to 2."),
        ("/topk 1.5", "'1.5' is not possible: top k is a whole number from 0 to 200."),
        ("/maxtokens many", "'many' is not possible"),
        ("/frobnicate", "There is no command '/frobnicate'; /help lists them."),
        ("/help me", "/help takes nothing."),
    ]:
        send(page, line)
        assert says in note(page)
        assert page.get_by_label("Message", exact=True).input_value() == line
    assert server.asked == []


def test_help_lists_the_commands_and_clear_begins_anew(page: Page, server: ScriptedServer):
    send(page, "/help")
    for command in ("/temperature", "/topk", "/maxtokens", "/seed", "/clear", "/help"):
        assert command in note(page)
    ask(page, "hello")
    send(page, "/clear")
    expect(page.locator("article")).to_have_count(0)
    ask(page, "//etc is a folder")
    assert [m["content"] for m in server.asked[1]["messages"]] == ["/etc is a folder"]
    expect(page.locator("#list li")).to_have_count(2)


def test_half_a_command_is_completed(page: Page):
    box = page.get_by_label("Message", exact=True)
    box.fill("/te")
    expect(page.get_by_role("list", name="Commands").get_by_role("listitem")).to_have_count(1)
    page.keyboard.press("Tab")
    assert box.input_value() == "/temperature "
    expect(box).to_be_focused()
    expect(page.get_by_role("list", name="Commands")).to_be_hidden()


def test_the_dialog_changes_the_same_settings(page: Page, server: ScriptedServer):
    page.get_by_role("button", name="Settings").click()
    dialog = page.get_by_role("dialog", name="Settings")
    dialog.get_by_label("Temperature").fill("1.5")
    dialog.get_by_label("Seed").fill("9")
    dialog.get_by_label("Max tokens").fill("0")
    page.keyboard.press("Tab")
    message = dialog.get_by_label("Max tokens").evaluate("input => input.validationMessage")
    assert message == "max tokens is a whole number from 1 to 4096"
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("button", name="Settings")).to_be_focused()
    ask(page, "hello")
    assert server.asked[0] | {"temperature": 1.5, "seed": 9, "max_tokens": 256} == server.asked[0]
    page.get_by_role("button", name="Settings").click()
    dialog.get_by_role("button", name="Reset").click()
    expect(page.get_by_role("button", name="Settings")).to_be_focused()  # the dialog has closed
    ask(page, "again")
    assert server.asked[1]["temperature"] == 0.8
    assert "seed" not in server.asked[1]
