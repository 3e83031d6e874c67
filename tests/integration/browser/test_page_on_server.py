"""The page and the real server, whose engine has no model."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from nanochat_core.server.service import ServerConfig
from tests.support.browser.chat import answers, ask, send
from tests.support.browser.fixtures import NOT_LOADED, Chromium, Complaints
from tests.support.nanochat_core.server.live import Live, serving, wait_until


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving() as server:
        yield server


@pytest.fixture
def keyed() -> Iterator[Live]:
    with serving(ServerConfig(log="none", keys=("secret",))) as server:
        yield server


@pytest.fixture
def page(chromium: Chromium, live: Live, complaints: Complaints) -> Iterator[Page]:
    with chromium.visit(live.url, complaints) as page:
        yield page


def test_an_answer_and_its_numbers_come_through(page: Page, live: Live):
    expect(page.get_by_role("heading", level=1)).to_have_text("tiny")
    expect(ask(page, "echo caf\u00e9 **bold**")).to_have_text("caf\u00e9 bold")
    expect(page.locator("article.assistant .meta")).to_contain_text("tokens \u00b7")
    page.reload()
    expect(answers(page)).to_have_text(["caf\u00e9 bold"])


def test_the_calculator_is_seen(page: Page, live: Live):
    ask(page, "call")
    expect(page.locator(".call b")).to_be_visible()


def test_the_marker_of_a_final_number_is_not_seen(page: Page, live: Live):
    expect(ask(page, "echo #### 42")).to_have_text("42")


def test_stopping_frees_the_slot(page: Page, live: Live):
    send(page, "/maxtokens 4000")
    send(page, "long")
    expect(answers(page)).not_to_be_empty()
    assert live.health()["running"] == 1
    page.keyboard.press("Escape")
    wait_until(lambda: live.health()["running"] == 0)
    expect(page.get_by_text("Stopped.", exact=True).last).to_be_visible()


def test_a_failing_engine_is_said_in_words(page: Page, live: Live):
    send(page, "fail")
    expect(page.get_by_role("button", name="Retry")).to_be_visible()
    expect(page.locator(".problem.wrong span")).not_to_be_empty()


def test_a_message_that_the_server_refuses_is_said_in_words(
    page: Page, live: Live, complaints: Complaints
):
    complaints.expect(NOT_LOADED)
    send(page, "x" * 5000)
    expect(page.locator(".problem.wrong")).to_contain_text("4095")
    assert page.locator("article.user .bubble").inner_text() == "x" * 5000


def test_a_server_with_a_key_is_opened_with_the_browsers_own_password_box(
    browser: Browser, keyed: Live
):
    context = browser.new_context(http_credentials={"username": "", "password": "secret"})
    page = context.new_page()
    page.goto(keyed.url)
    expect(ask(page, "echo hello")).to_have_text("hello")
    context.close()
