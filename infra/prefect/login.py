"""Build the address that logs a browser in to a home's Prefect server."""

from pathlib import Path
from urllib.parse import quote

from infra.prefect.password import find_password, pages_directory
from infra.prefect.records import find_process_of_server

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


def login_address(home: Path) -> str | None:
    """Return the address that logs a browser in to the running server of `home`.

    None means that no server runs, that it has no password, or that Prefect has not written its
    pages yet.
    """
    server, password = find_process_of_server(home), find_password(home)
    # Prefect creates this directory anew when it first starts: an earlier file would be lost.
    pages = pages_directory(home) / "v1"
    if server is None or not server.is_guarded or password is None or not pages.is_dir():
        return None
    page = pages / LOGIN_PAGE
    if not page.exists():
        page.write_text(_LOGIN, encoding="utf-8")
    return f"{server.ui_url}/{LOGIN_PAGE}#{quote(password, safe=':')}"
