"""The page and the real server, whose engine has no model."""

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from nanochat_core.server.service import ServerConfig
from tests.support.browser.chat import answers, ask, send
from tests.support.browser.fixtures import NOT_LOADED, Chromium, Complaints
from tests.support.nanochat_core.server.live import Live, serving


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving() as server:
        yield server


@pytest.fixture
def page(chromium: Chromium, live: Live, complaints: Complaints) -> Iterator[Page]:
    with chromium.visit(live.url, complaints) as page:
        yield page


def test_all_that_the_server_sends_is_understood(page: Page, live: Live, complaints: Complaints):
    complaints.expect(NOT_LOADED)
    expect(page.get_by_role("heading", level=1)).to_have_text("tiny")
    expect(ask(page, "echo caf\u00e9 **bold**")).to_have_text("caf\u00e9 bold")
    expect(page.locator("article.assistant .meta")).to_contain_text("tokens \u00b7")
    page.reload()
    expect(answers(page)).to_have_text(["caf\u00e9 bold"])
    ask(page, "call")
    expect(page.locator(".call b")).to_be_visible()
    expect(ask(page, "echo #### 42")).to_have_text("42")
    send(page, "fail")
    expect(page.locator(".problem.wrong span")).to_have_text("The engine failed.")
    send(page, "x" * 5000)
    expect(page.locator(".problem.wrong").last).to_contain_text("4095")
    assert page.locator("article.user .bubble").last.inner_text() == "x" * 5000


def test_a_server_with_a_key_is_opened_with_the_browsers_own_password_box(
    open_at: Callable[..., Page],
):
    password = {"username": "", "password": "secret"}
    with serving(ServerConfig(log="none", keys=("secret",))) as keyed:
        page = open_at(keyed.url, http_credentials=password)
        expect(ask(page, "echo hello")).to_have_text("hello")
