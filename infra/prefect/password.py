"""The password of a home's Prefect server: HOME/prefect/password, readable by its owner only.

A client of Prefect's API can run code as the user of its workers. So a local server requires a
password too: other users of the machine, and web pages in a browser, can reach its port.
Commands and workers read the file; a browser is logged in by the address that `nanochat up` prints.
That is a page of the server's own, which stores the password for Prefect's pages.
"""

import os
import secrets
import stat
from pathlib import Path
from urllib.parse import quote

from infra.prefect.records import find_process_of_server
from nanochat_core.job import sync_directory

USER = "nanochat"
_SECRET_BYTES = 24
LOGIN_PAGE = "nanochat-login.html"

# Prefect's pages read the password from this key of the browser's local storage, which belongs to
# the origin. The address carries it as a fragment, which a browser never sends to a server, so no
# log has it.
_LOGIN = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<title>Prefect of nanochat-flows: log in</title>
<body>
<noscript>Logging in needs JavaScript.</noscript>
<script>
  const password = decodeURIComponent(location.hash.slice(1));
  if (password) localStorage.setItem("prefect-password", btoa(password));
  location.replace("/");
</script>
</body>
"""


def password_path(home: Path) -> Path:
    """Return the path of the password of a home's server."""
    return home / "prefect" / "password"


def find_password(home: Path) -> str | None:
    """Return `user:password` of the home's server, or None if it has none of ours."""
    try:
        descriptor = os.open(password_path(home), os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, encoding="ascii") as file:
            # Another user who may write here could plant a password that is known to them.
            status = os.fstat(file.fileno())
            is_mine = stat.S_ISREG(status.st_mode) and status.st_uid in (os.geteuid(), 0)
            return file.read().strip() or None if is_mine else None
    except (OSError, ValueError):
        return None


def ensure_password(home: Path) -> str:
    """Return the home's password, created on first use. Call it under the server's start lock.

    Raises OSError if it cannot be written.
    """
    if (found := find_password(home)) is not None:
        return found
    password = f"{USER}:{secrets.token_urlsafe(_SECRET_BYTES)}"
    path = password_path(home)
    temporary = path.with_name(".password.tmp")
    temporary.unlink(missing_ok=True)
    # Private from its creation: a chmod afterwards would leave a moment to read it.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{password}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)
    return password


def remove_password(home: Path) -> None:
    """Remove the password, so that the home's next server requires none."""
    password_path(home).unlink(missing_ok=True)


def pages_directory(home: Path) -> Path:
    """Return the directory of Prefect's pages; the login page is added, to have their origin."""
    return home / "prefect" / "pages"


def login_address(home: Path) -> str | None:
    """Return the address that logs a browser in to the running server of `home`.

    None means that no server runs, that it has no password, or that Prefect has not written its
    pages yet.
    """
    server, password = find_process_of_server(home), find_password(home)
    # Prefect creates this directory when it first starts: an earlier file would be lost.
    pages = pages_directory(home) / "v1"
    if server is None or password is None or not pages.is_dir():
        return None
    page = pages / LOGIN_PAGE
    if not page.exists():
        page.write_text(_LOGIN, encoding="utf-8")
    return f"{server.ui_url}/{LOGIN_PAGE}#{quote(password, safe=':')}"
