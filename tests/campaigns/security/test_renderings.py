import re

import pytest

from tests.campaigns.security import http, page, records
from tests.support.browser.chromium import NO_CHROMIUM, find_chromium

LEAKY = "tests.support.nanochat_core.server.fake_engine:open_leaky"
# An answer that looks like an element becomes one, as if the page did not escape it.
UNESCAPED = """addEventListener("DOMContentLoaded", () => new MutationObserver(() => {
  for (const body of document.querySelectorAll("article.assistant .body"))
    if (body.textContent.endsWith(">") && body.querySelector("img") === null)
      body.innerHTML = body.textContent;
}).observe(document.body, {subtree: true, childList: true}));"""


def test_a_malformed_record_ends_no_command_with_a_traceback():
    commands = (("status",), ("ls", "--json"), ("plan", "tiny"), ("sql", "select * from stages"))
    (row,) = records.run(20261122, rounds=1, commands=commands)
    assert row.got_through == ()
    assert row.attempts > 60


def test_an_engine_that_answers_the_wrong_client_gets_through_the_requests():
    fuzz, refusals = http.run(0, count=800, maker=LEAKY)
    assert any(
        re.search(r"canary[0-9a-f]{16} of another request", what) for what in fuzz.got_through
    )
    assert (refusals.attempts > 0, refusals.got_through) == (True, ())


@pytest.mark.skipif(find_chromium() is None, reason=NO_CHROMIUM)
def test_a_page_that_does_not_escape_gets_through_the_renderings():
    texts = ["<img src=x onerror='window.hit = 1'>", "a plain sentence"]
    [held] = page.run(texts)
    assert (held.attempts, held.got_through) == (4 * len(texts), ())
    [row] = page.run(texts, flaw=UNESCAPED)
    [through] = row.got_through
    assert "<img src=x" in through
    assert "a script ran" in through
