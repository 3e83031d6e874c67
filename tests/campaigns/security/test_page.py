"""Hostile texts on the chat page are inert while they are streamed.

As questions and answers from the storage `make test` shows them all.
"""

import pytest
from playwright.sync_api import Page

from tests.support.browser.chat import ask
from tests.support.browser.fixtures import *  # noqa: F403 - pytest looks for fixtures here
from tests.support.browser.page_corpus import EVERYWHERE, harm
from tests.support.browser.scripted_server import ScriptedServer, answer


@pytest.mark.timeout(1800)
def test_hostile_texts_are_inert_while_they_are_streamed(page: Page, server: ScriptedServer):
    for text in EVERYWHERE:
        server.replies.append(answer(text, size=7))  # markup is cut in the middle
        ask(page, text)
        assert harm(page) == []
