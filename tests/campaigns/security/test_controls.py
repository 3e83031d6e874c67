"""What the attacks must notice: a page that follows answers, an open server, an open home."""

import os
import re
import tempfile
from pathlib import Path

import pytest

from infra.prefect.server import start_server, stop_server, wait_for_server
from tests.campaigns.security import page, prefect
from tests.campaigns.security.test_renderings import UNESCAPED
from tests.support.browser.chromium import NO_CHROMIUM, find_chromium
from tests.support.infra.stack.attempts import (
    try_api_as_another_user,
    try_files_as_another_user,
    try_wrong_passwords,
)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.mark.skipif(find_chromium() is None, reason=NO_CHROMIUM)
def test_a_page_that_follows_an_answer_gets_through_the_renderings():
    text = "<form action=/elsewhere><input autofocus onfocus=this.form.submit()></form>"
    [row] = page.run([text], flaw=UNESCAPED)
    assert "/elsewhere" in row.got_through[0]


@pytest.mark.prefect
def test_a_server_without_a_password_gets_through_the_attempts(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)
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
