"""Attempts on a home's own Prefect server by those who have no business there.

Each function returns what got through by attempt: "" where the attempt was refused.
"""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx

from infra.prefect.server import password_path
from tests.support.infra.stack.live import LiveStack, make_code
from tests.support.serving import QuietHandler, serving

NOBODY = 65534  # the user and group of that name
OWNER = 65533  # of the stack, if we are root
# It may read everything, since our Python may lie where only root can go.
_AS_OWNER = (
    *("setpriv", f"--reuid={OWNER}", f"--regid={OWNER}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
)
PLANTED = "planted"
WRONG_PASSWORDS = ("", "nanochat:", "nanochat:wrong", ":", "admin:admin", "nanochat")
# The last is how a flow runs code: a deployment whose pull step is a shell.
CHANGES = ("/flows/", "/work_pools/", "/deployments/")

# What a page of another origin can try: read, and have the server store something that runs code.
TRIES = ("read", "post", "token", "post unseen")
REFUSED = ("refused", "refused", "refused", "opaque:0")  # a page never sees what the last brought
ATTACK = """<!doctype html><title>waiting</title><script>
const api = "%s";
const post = {method: "POST", headers: {"Content-Type": "text/plain"}, body: '{"name": "planted"}'};
const tries = [fetch(api + "/admin/version"), fetch(api + "/flows/", post),
               fetch(api + "/csrf-token?client=mine"),
               fetch(api + "/flows/", {...post, mode: "no-cors"})];
Promise.allSettled(tries).then(all => { document.title = all.map(one =>
  one.status === "fulfilled" ? `${one.value.type}:${one.value.status}` : "refused").join(" "); });
</script>"""

# Our Python may lie where another user cannot go, so these are for a shell.
LIST = 'ls "$1"'
READ = 'head -c 1 "$1" > /dev/null && echo read'
WRITE = '(: > "$1/planted") && echo written'
ASK = (
    'exec 3<>"/dev/tcp/127.0.0.1/$1"; '
    "printf '%s %s HTTP/1.0\\r\\nHost: %s\\r\\nContent-Type: application/json\\r\\n"
    'Content-Length: 18\\r\\n\\r\\n{"name":"planted"}\' "$2" "$3" "$4" >&3; '
    "head -n 1 <&3"
)


@contextlib.contextmanager
def running_stack(*options: str, history: Path | None = None) -> Iterator[LiveStack]:
    """Bring a stack up in a home that the modes of no directory above it protect.

    `options` are those of `nanochat up`; `history` is a database that the home has already. If this
    process is root's, the stack is another user's, who has no name and no home directory.
    """
    with tempfile.TemporaryDirectory(prefix="stack-") as directory:
        Path(directory).chmod(0o755)
        stack = LiveStack(
            Path(directory) / "home",
            code=make_code(Path(directory) / "code"),
            prefix=_AS_OWNER if os.geteuid() == 0 else (),
        )
        stack.home.mkdir()
        if history is not None:
            (stack.home / "prefect").mkdir()
            shutil.copy(history, stack.home / "prefect" / "prefect.db")
        if os.geteuid() == 0:
            for path in (stack.home, *stack.home.rglob("*")):
                os.chown(path, OWNER, OWNER)
        try:
            done = stack.up(*options)
            assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
            yield stack
        finally:
            stack.down()
        assert stack.processes() == []


def as_another_user(script: str, *arguments: str) -> str:
    """Return what a shell of another user prints; only root can become one."""
    done = subprocess.run(
        ["bash", "-c", script, "bash", *arguments],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.strip()


def try_files_as_another_user(home: Path) -> dict[str, str]:
    """List, read and write in a home as another user."""
    prefect = home / "prefect"
    outcome: dict[str, str] = {}
    for folder in (home, prefect):
        outcome[f"list {folder.name}"] = as_another_user(LIST, str(folder))
        outcome[f"write to {folder.name}"] = as_another_user(WRITE, str(folder))
    for file in (password_path(home), prefect / "prefect.db", prefect / "server.json"):
        assert file.is_file(), f"{file} does not exist"
        outcome[f"read {file.name}"] = as_another_user(READ, str(file))
    return outcome


def try_api_as_another_user(api_url: str) -> dict[str, str]:
    """Ask for data and for a change as another user, by the server's own name and a foreign one."""
    url = httpx.URL(api_url)
    outcome: dict[str, str] = {}
    for method, path in (("GET", "/admin/version"), ("POST", "/flows/"), ("POST", "/work_pools/")):
        for host in (f"127.0.0.1:{url.port}", "evil.example"):
            line = as_another_user(ASK, str(url.port), method, f"{url.path}{path}", host)
            held = line.split(" ")[1:2] in (["401"], ["403"])
            outcome[f"{method} {path} of {host}"] = "" if held else line or "no answer"
    return outcome


def try_wrong_passwords(api_url: str, token: dict[str, str]) -> dict[str, str]:
    """Ask for data and for changes with no password, and with wrong ones.

    `token` is that of `csrf_token`: without one a change is refused whatever its password.
    """
    outcome: dict[str, str] = {}
    for password in (None, *WRONG_PASSWORDS):
        name, _, word = (password or "").partition(":")
        auth = None if password is None else httpx.BasicAuth(name, word)
        for path in ("/admin/version", "/csrf-token?client=mine", *CHANGES):
            method, body = ("POST", {"name": PLANTED}) if path in CHANGES else ("GET", None)
            status = _status(method, api_url + path, auth, body, token)
            held = status == HTTPStatus.UNAUTHORIZED
            outcome[f"{method} {path}, password {password!r}"] = "" if held else f"status {status}"
    return outcome


def csrf_token(api_url: str, password: str) -> dict[str, str]:
    """Return the headers that a change needs besides the password."""
    auth = httpx.BasicAuth(*password.split(":", 1))
    with httpx.Client(auth=auth, timeout=60, trust_env=False) as client:
        answer = client.get(f"{api_url}/csrf-token", params={"client": "mine"}).raise_for_status()
    return {"Prefect-Csrf-Token": answer.json()["token"], "Prefect-Csrf-Client": "mine"}


def try_without_a_token(api_url: str, password: str) -> dict[str, str]:
    """Ask for changes with the right password, but without a token, or with a wrong one."""
    auth = httpx.BasicAuth(*password.split(":", 1))
    outcome: dict[str, str] = {}
    for headers in ({}, {"Prefect-Csrf-Token": "wrong", "Prefect-Csrf-Client": "mine"}):
        for path in CHANGES:
            status = _status("POST", api_url + path, auth, {"name": PLANTED}, headers)
            held = status == HTTPStatus.FORBIDDEN
            given = "a wrong token" if headers else "no token"
            outcome[f"POST {path}, {given}"] = "" if held else f"status {status}"
    return outcome


def _status(
    method: str,
    url: str,
    auth: httpx.Auth | None,
    body: dict[str, str] | None,
    headers: dict[str, str],
) -> int:
    with httpx.Client(auth=auth, timeout=60, trust_env=False) as client:
        return client.request(method, url, json=body, headers=headers).status_code


def log_in(page: Any, api_url: str, password: str) -> None:
    """Open Prefect's pages and type the password that they ask for."""
    page.goto(api_url.removesuffix("/api"))
    page.get_by_placeholder("admin:pass").fill(password)
    page.get_by_role("button", name="Login").click()


@contextlib.contextmanager
def _foreign_page(api_url: str) -> Iterator[str]:
    """Serve the page that attacks, on another port of this machine; yield its address."""

    class Foreign(QuietHandler):
        def do_GET(self) -> None:
            self.reply(200, (ATTACK % api_url).encode(), content_type="text/html")

    with serving(Foreign) as port:
        yield f"http://127.0.0.1:{port}/"


def try_from_a_foreign_origin(stack: LiveStack) -> dict[str, str]:
    """Log in with the printed password in Chromium; there, open a page of another origin."""
    from playwright.sync_api import expect, sync_playwright

    from tests.support.browser.chromium import launch

    said = stack.show("up")
    password = re.search(r"^password\s+(\S+)\s*$", said, flags=re.MULTILINE)
    assert password is not None, said
    with _foreign_page(stack.api_url) as foreign, sync_playwright() as playwright:
        browser = launch(playwright)
        page = browser.new_page()
        log_in(page, stack.api_url, password[1])
        expect(page).to_have_url(re.compile("dashboard"), timeout=60_000)
        expect(page.get_by_text("Work Pools").first).to_be_visible(timeout=60_000)
        page.goto(foreign)
        expect(page).to_have_title(re.compile("refused|:"), timeout=60_000)
        got = page.title().split(" ")
        browser.close()
    outcome = {
        f"{what} from a foreign origin": "" if seen == right else seen
        for what, seen, right in zip(TRIES, got, REFUSED, strict=True)
    }
    flows = {flow["name"] for flow in stack.ask("/flows/filter", {})}
    outcome["a flow stored from anywhere"] = PLANTED if PLANTED in flows else ""
    return outcome
