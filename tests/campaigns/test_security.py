import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from infra.prefect.server import start_server, stop_server, wait_for_server
from tests.browser.chromium import NO_CHROMIUM, find_chromium
from tests.campaigns.security import http, page, prefect, records
from tests.campaigns.security.__main__ import PARTS, render
from tests.campaigns.security.rows import Row
from tests.infra.stack.attempts import (
    try_api_as_another_user,
    try_files_as_another_user,
    try_wrong_passwords,
)
from tests.reliability.test_fuzz_server import LEAKY

# An answer that looks like an element becomes one, as if the page did not escape it.
UNESCAPED = """addEventListener("DOMContentLoaded", () => new MutationObserver(() => {
  for (const body of document.querySelectorAll("article.assistant .body"))
    if (body.textContent.endsWith(">") && body.querySelector("img") === null)
      body.innerHTML = body.textContent;
}).observe(document.body, {subtree: true, childList: true}));"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def test_the_table_counts_what_held_and_names_what_got_through():
    rows = [
        Row(part="walls", attempts=5, got_through=(), seconds=1.4),
        Row(part="doors", attempts=3, got_through=("a key: copied",), seconds=2.0),
    ]
    assert render(rows).splitlines()[2:] == [
        "| walls | 5 | 5 | 0 | 1 |",
        "| doors | 3 | 2 | 1 | 2 |",
        "doors: a key: copied",
    ]


def test_a_part_that_does_not_exist_is_refused():
    command = [sys.executable, "-m", "tests.campaigns.security", "cellar"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"no part cellar; there is {', '.join(PARTS)}" in done.stderr


def test_a_malformed_record_ends_no_command_with_a_traceback():
    commands = (("status",), ("ls", "--json"), ("plan", "tiny"), ("sql", "select * from stages"))
    (row,) = records.run(rounds=1, commands=commands)
    assert row.got_through == ()
    assert row.attempts > 60


def test_an_engine_that_answers_the_wrong_client_gets_through_the_requests():
    fuzz, refusals = http.run(800, maker=LEAKY)
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


@pytest.mark.skipif(find_chromium() is None, reason=NO_CHROMIUM)
def test_a_page_that_follows_an_answer_gets_through_the_renderings():
    text = "<form action=/elsewhere><input autofocus onfocus=this.form.submit()></form>"
    [row] = page.run([text], flaw=UNESCAPED)
    assert "/elsewhere" in row.got_through[0]


@pytest.mark.prefect
def test_a_server_without_a_password_gets_through_the_attempts(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("NANOCHAT_PREFECT_AUTH", raising=False)
    (tmp_path / "prefect").mkdir()
    server = start_server(tmp_path, guarded=False)
    try:
        wait_for_server(tmp_path, server)
        row = prefect.attempt("open", lambda: try_wrong_passwords(server.api_url, {}))
        asked = try_api_as_another_user(server.api_url) if os.geteuid() == 0 else None
    finally:
        stop_server(tmp_path)
    assert any(re.match(r"GET /admin/version.*status 200", what) for what in row.got_through)
    assert asked is None or any("200" in what for what in asked.values())


@needs_root
def test_a_home_that_others_may_read_gets_through_the_attempts():
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        home.chmod(0o755)
        (home / "prefect").mkdir()
        for name in ("password", "prefect.db", "server.json"):
            (home / "prefect" / name).write_text("x")
        row = prefect.attempt("open", lambda: try_files_as_another_user(home))
    assert "read prefect.db: read" in row.got_through
    assert f"list {home.name}: prefect" in row.got_through
