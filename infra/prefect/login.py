"""The address that logs a browser in to a home's Prefect server."""

from pathlib import Path
from urllib.parse import quote

from infra.prefect.password import find_password, pages_directory
from infra.prefect.server import find_process

LOGIN_PAGE = "nanochat-login.html"

# Prefect's pages read the password from this place of the browser's storage, which belongs to the
# origin. A fragment is never sent to a server or written to its log.
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
    """The address that logs a browser in to the running server of `home`, if it has a password.

    The server's own pages must be there: it makes their directory anew when it first starts.
    """
    server, password = find_process(home), find_password(home)
    pages = pages_directory(home) / "v1"
    if server is None or not server.is_guarded or password is None or not pages.is_dir():
        return None
    page = pages / LOGIN_PAGE
    if not page.exists():
        page.write_text(_LOGIN, encoding="utf-8")
    return f"{server.ui_url}/{LOGIN_PAGE}#{quote(password, safe=':')}"
