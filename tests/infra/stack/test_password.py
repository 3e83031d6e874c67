"""A home's own server asks other users, other origins and unasked changes for its password."""

import http.server
import os
import re
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import httpx
import pytest

from infra.prefect_password import ensure_password, find_password, password_path
from infra.prefect_server import start_server, stop_server, wait_for_server
from tests.infra.stack.live import LiveStack, make_code

NOBODY = 65534  # the user and group of that name
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

# What a page of another origin can try: read, and have the server store something that runs code.
ATTACK = """<!doctype html><title>waiting</title><script>
const api = "%s";
const post = {method: "POST", headers: {"Content-Type": "text/plain"}, body: '{"name": "planted"}'};
const tries = [fetch(api + "/admin/version"), fetch(api + "/flows/", post),
               fetch(api + "/csrf-token?client=mine"),
               fetch(api + "/flows/", {...post, mode: "no-cors"})];
Promise.allSettled(tries).then(all => { document.title = all.map(one =>
  one.status === "fulfilled" ? `${one.value.type}:${one.value.status}` : "refused").join(" "); });
</script>"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """A stack whose owner has set no password."""
    directory = tmp_path_factory.mktemp("own")
    stack = LiveStack(directory / "home", code=make_code(directory / "code"), password=None)
    try:
        done = stack.nanochat("up", "--pool", "cpu")
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        yield stack
    finally:
        stack.nanochat("down")


def as_another_user(script: str, *arguments: str) -> str:
    """What a shell of another user prints. Our Python may lie where that user cannot go."""
    done = subprocess.run(
        ["bash", "-c", script, "bash", *arguments],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.strip()


def test_a_password_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "prefect").mkdir()

    password = ensure_password(tmp_path)

    assert re.fullmatch(r"nanochat:[\w-]{32}", password)
    assert ensure_password(tmp_path) == find_password(tmp_path) == password
    assert stat.S_IMODE(password_path(tmp_path).stat().st_mode) == 0o600


def test_a_link_in_its_place_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "prefect").mkdir()
    (tmp_path / "elsewhere").write_text("nanochat:known-to-all\n")
    password_path(tmp_path).symlink_to(tmp_path / "elsewhere")

    assert find_password(tmp_path) is None
    ensure_password(tmp_path)
    assert (tmp_path / "elsewhere").read_text() == "nanochat:known-to-all\n"


@pytest.mark.prefect
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_gets_neither_the_password_nor_in(own: LiveStack) -> None:
    reading = 'cat "$1" && echo read'
    asking = (
        'exec 3<>"/dev/tcp/127.0.0.1/$1"; '
        "printf 'GET /api/admin/version HTTP/1.0\\r\\n\\r\\n' >&3; "
        "head -n 1 <&3"
    )
    files = [own.home, own.home / "prefect", password_path(own.home)]
    port = str(own.record.ui_url).rpartition(":")[2]

    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o700, 0o700, 0o600]
    assert as_another_user(reading, str(password_path(own.home))) == ""
    assert as_another_user(reading, str(own.home / "prefect" / "prefect.db")) == ""
    assert "401" in as_another_user(asking, port)


@pytest.mark.prefect
@pytest.mark.timeout(600)
def test_a_change_needs_a_token_besides_the_password(own: LiveStack) -> None:
    auth = httpx.BasicAuth(*str(find_password(own.home)).split(":"))
    url = f"{own.record.api_url}/flows/"

    answer = httpx.post(url, auth=auth, json={"name": "planted"}, timeout=60, trust_env=False)

    assert answer.status_code == HTTPStatus.FORBIDDEN
    assert "CSRF" in answer.text


@pytest.mark.prefect
@pytest.mark.timeout(600)
def test_the_password_is_in_no_command_line_and_no_log(own: LiveStack) -> None:
    secret = str(find_password(own.home)).partition(":")[2]
    words = [" ".join(process.cmdline()) for process in own.processes()]
    logs = list((own.home / "prefect").glob("*.log"))

    assert len(words) >= 3  # keeper, server, worker
    assert not [line for line in words if secret in line]
    assert logs
    assert not [log for log in logs if secret in log.read_text()]


@pytest.mark.prefect
@pytest.mark.timeout(600)
def test_the_printed_address_logs_in_and_a_foreign_origin_gets_nothing(own: LiveStack) -> None:
    if CHROMIUM is None:
        pytest.skip("no Chromium (Debian: apt-get install chromium)")
    from playwright.sync_api import expect, sync_playwright

    class Foreign(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write((ATTACK % own.record.api_url).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    foreign = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Foreign)
    thread = threading.Thread(target=foreign.serve_forever)
    thread.start()
    said = own.nanochat("up", "--pool", "cpu").stdout
    address = re.search(r"^log in\s+(\S+)$", said, flags=re.MULTILINE)
    assert address is not None, said
    try:
        with sync_playwright() as playwright:
            arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
            page = browser.new_page()
            page.goto(address[1])
            expect(page).to_have_url(re.compile("dashboard"), timeout=60_000)
            expect(page.get_by_text("Work Pools").first).to_be_visible(timeout=60_000)
            # The same browser, which is logged in now, on a page of another port of this machine.
            page.goto(f"http://127.0.0.1:{foreign.server_port}/")
            expect(page).to_have_title(re.compile("opaque"), timeout=60_000)
            outcome = page.title()
            browser.close()
    finally:
        foreign.shutdown()
        thread.join()
        foreign.server_close()

    assert outcome == "refused refused refused opaque:0"
    assert "planted" not in {flow["name"] for flow in own.ask("/flows/filter", {})}


@pytest.mark.prefect
def test_a_server_without_a_password_is_had_by_asking_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NANOCHAT_PREFECT_AUTH", raising=False)
    (tmp_path / "prefect").mkdir()
    ensure_password(tmp_path)  # of an earlier server

    server = start_server(tmp_path, guarded=False)
    try:
        wait_for_server(tmp_path, server)
        answer = httpx.get(f"{server.api_url}/admin/version", timeout=60, trust_env=False)
    finally:
        stop_server(tmp_path)

    assert answer.status_code == HTTPStatus.OK
    assert (server.is_guarded, find_password(tmp_path)) == (False, None)
