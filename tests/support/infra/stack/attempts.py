"""Attempts on a home's own Prefect server by those who have no business there.

Each function returns what the attempts that got through brought.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import httpx

from infra.prefect.server import password_path
from tests.support.infra.stack.live import LiveStack

NOBODY = 65534  # the user and group of that name
OWNER = 65533  # of the stack, if we are root
# It may read everything, since our Python may lie where only root can go.
_AS_OWNER = (
    *("setpriv", f"--reuid={OWNER}", f"--regid={OWNER}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
)
PLANTED = "planted"
PASSWORDS = ("", "nanochat:", "nanochat:wrong", ":", "admin:admin", "nanochat")
# The last is how a flow runs code: a deployment whose pull step is a shell.
CHANGES = ("/flows/", "/work_pools/", "/deployments/")

# Our Python may lie where another user cannot go, so these are for a shell.
LIST = 'ls "$1"'
READ = 'head -c 1 "$1" > /dev/null && echo read'
WRITE = '(: > "$1/planted") && echo written'


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
    files = (password_path(home), prefect / "prefect.db", prefect / "server.json")
    assert all(file.is_file() for file in files)
    outcome = {f"read {file.name}": as_another_user(READ, str(file)) for file in files}
    for folder in (home, prefect):
        outcome[f"list {folder.name}"] = as_another_user(LIST, str(folder))
        outcome[f"write to {folder.name}"] = as_another_user(WRITE, str(folder))
    return {attempt: got for attempt, got in outcome.items() if got}


def try_wrong_passwords(api_url: str, token: dict[str, str]) -> dict[str, str]:
    """Ask for data and for changes with no password, by a foreign name too, and with wrong ones.

    `token` is that of `csrf_token`: without one a change is refused whatever its password.
    """
    through: dict[str, str] = {}
    guesses = [(None, {"Host": "evil.example"}), *((each, {}) for each in (None, *PASSWORDS))]
    for password, host in guesses:
        for path in ("/admin/version", "/csrf-token?client=mine", *CHANGES):
            answer = _ask(api_url + path, password, token | host)
            if answer.status_code != HTTPStatus.UNAUTHORIZED:
                through[f"{path}, password {password!r}, {host}"] = f"status {answer.status_code}"
    return through


def csrf_token(api_url: str, password: str) -> dict[str, str]:
    """Return the headers that a change needs besides the password."""
    answer = _ask(f"{api_url}/csrf-token?client=mine", password, {}).raise_for_status()
    return {"Prefect-Csrf-Token": answer.json()["token"], "Prefect-Csrf-Client": "mine"}


def try_without_a_token(api_url: str, password: str) -> dict[str, str]:
    """Ask for changes with the right password, but without a token, or with a wrong one."""
    through: dict[str, str] = {}
    for headers in ({}, {"Prefect-Csrf-Token": "wrong", "Prefect-Csrf-Client": "mine"}):
        for path in CHANGES:
            answer = _ask(api_url + path, password, headers)
            if answer.status_code != HTTPStatus.FORBIDDEN:
                through[f"{path}, token {headers}"] = f"status {answer.status_code}"
    return through


def try_from_an_origin(api_url: str, origin: str, password: str) -> dict[str, str]:
    """Ask with the right password, as a browser does for a page of this origin.

    Return what the server lets the browser give to the page: an answer, or leave to change things.
    """
    asked = "Access-Control-Request"
    leave = {f"{asked}-Method": "POST", f"{asked}-Headers": "content-type"}
    through: dict[str, str] = {}
    for method, path, headers in (
        ("GET", "/admin/version", {}),
        ("GET", "/csrf-token?client=mine", {}),
        ("OPTIONS", "/flows/", leave),
    ):
        answer = _ask(api_url + path, password, {"Origin": origin, **headers}, method=method)
        if allowed := answer.headers.get("Access-Control-Allow-Origin"):
            through[f"{method} {path}"] = allowed
    return through


def _ask(
    url: str, password: str | None, headers: dict[str, str], *, method: str | None = None
) -> httpx.Response:
    """Send a request: one that changes something if the address ends with a slash."""
    name, _, word = (password or "").partition(":")
    auth = None if password is None else httpx.BasicAuth(name, word)
    default, body = ("POST", {"name": PLANTED}) if url.endswith("/") else ("GET", None)
    with httpx.Client(auth=auth, timeout=60, trust_env=False) as client:
        return client.request(method or default, url, json=body, headers=headers)
