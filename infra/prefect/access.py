"""Address and password of the Prefect server, and plain requests to its API.

Both are Prefect's own settings: PREFECT_API_URL names a shared server, PREFECT_API_AUTH_STRING is
"user:password" (PREFECT_API_KEY, a key of Prefect Cloud). The password of a home's own server is in
the home: infra/prefect/password.py. It is secret, and so is NANOCHAT_WEBHOOK, an address to which
any client that knows it may post: they go to the environment of processes that need them and never
appear on a command line, in a record or in a log.
"""

import base64
import http.client
import json
import os
import re
import urllib.error
import urllib.request
import uuid
from http import HTTPStatus
from typing import Any

from infra.polling import ANSWER_SECONDS
from nanochat_core.errors import NanochatError

AUTH = "PREFECT_API_AUTH_STRING"
WEBHOOK = "NANOCHAT_WEBHOOK"
_THIS_MACHINE = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d*)?")  # host and port of a URL


class ServerError(NanochatError):
    """An error of starting or reaching the Prefect server."""


def configured_api_url() -> str | None:
    """Return the shared Prefect server to use (PREFECT_API_URL), or None for a local one."""
    return os.environ.get("PREFECT_API_URL", "").rstrip("/") or None


def configured_webhook() -> str | None:
    """Return NANOCHAT_WEBHOOK, the address that alerts are posted to, or None for no alerts."""
    return os.environ.get(WEBHOOK) or None


def ask(
    api_url: str,
    path: str,
    *,
    body: Any = None,
    method: str | None = None,
    may_lack: bool = False,
) -> Any:
    """Send a GET of `path`, or a POST of `body`; return the JSON answer.

    None means an empty answer, and with `may_lack` that what is asked for does not exist. Raises
    OSError if the server does not answer, and its subclass HTTPError if it refuses.
    """
    request = urllib.request.Request(f"{api_url}{path}", headers=_headers(), method=method)
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
        for name, value in _csrf_headers(api_url).items():
            request.add_header(name, value)
    # urllib would use the proxy of the environment even for 127.0.0.1.
    proxies = {} if _THIS_MACHINE.fullmatch(request.host or "") else _proxies()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
    try:
        with opener.open(request, timeout=ANSWER_SECONDS) as response:
            return json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        if not may_lack or error.code != HTTPStatus.NOT_FOUND:
            raise
        error.close()  # it holds a connection
        return None
    except http.client.HTTPException as error:  # cut, not HTTP, or an address with a wrong port
        raise ConnectionError(" ".join(f"{type(error).__name__} {error}".split())) from error


def _proxies() -> dict[str, str]:
    """Return the proxies of the environment, by scheme; urllib itself does not know ALL_PROXY."""
    found = urllib.request.getproxies()
    if (proxy := found.get("all", "")).startswith("http"):  # urllib cannot use another kind
        return dict.fromkeys(("http", "https"), proxy) | found
    return found


def check_client() -> None:
    """Raise ServerError if the environment keeps Prefect's client from being made.

    It takes every proxy and certificate that the environment names, also for a local server.
    """
    import httpx

    try:
        httpx.Client().close()
    except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
        raise ServerError(
            f"Prefect's client cannot be made: {error}",
            hint="check HTTPS_PROXY, HTTP_PROXY, ALL_PROXY (http, https, socks5 or socks5h), "
            "NO_PROXY and SSL_CERT_FILE",
        ) from error


def may_pass(error: urllib.error.HTTPError) -> bool:
    """Return whether the same request may succeed later: the server has failed, or is busy."""
    busy = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
    return error.code >= HTTPStatus.INTERNAL_SERVER_ERROR or error.code in busy


def _csrf_headers(api_url: str) -> dict[str, str]:
    """Return the headers that CSRF protection requires of each change: a token from the server."""
    client = uuid.uuid4().hex
    try:
        token = ask(api_url, f"/csrf-token?client={client}")["token"]
    except urllib.error.HTTPError as error:
        if error.code in (404, 422):  # the server has no such protection, or it is switched off
            return {}
        raise
    return {"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": client}


def answers(api_url: str) -> bool:
    """Return whether a Prefect server answers; needs no password."""
    try:
        return ask(api_url, "/health") is True
    except (OSError, ValueError):
        return False


def check_admitted(api_url: str) -> bool:
    """Return whether a Prefect server answers; raise ServerError if it refuses our password."""
    # The health endpoint needs no password, so it cannot show whether ours is right.
    if not answers(api_url):
        return False
    try:
        ask(api_url, "/admin/version")
    except urllib.error.HTTPError as error:
        error.close()  # it holds a connection
        is_refused = error.code in (401, 403)
    except (OSError, ValueError):
        return False
    else:
        return True
    if is_refused:
        raise refused_password(api_url)
    return True


def refused_password(api_url: str) -> ServerError:
    """Return the error of a server that refuses our password, or that we have none."""
    return ServerError(
        f"the Prefect server at {api_url} "
        + (f"refuses {AUTH}" if os.environ.get(AUTH) else "asks for a password"),
        hint=f"set {AUTH} to its user:password",
    )


def check_answers(api_url: str) -> None:
    """Raise ServerError unless a Prefect server answers at `api_url` and accepts our password."""
    if not check_admitted(api_url):
        raise ServerError(
            f"no Prefect server answers at {api_url}",
            hint="start that server, or unset PREFECT_API_URL: then a local one is used and "
            "started by itself",
        )


def _headers() -> dict[str, str]:
    if given := os.environ.get(AUTH):
        return {"Authorization": f"Basic {base64.b64encode(given.encode()).decode()}"}
    if key := os.environ.get("PREFECT_API_KEY"):
        return {"Authorization": f"Bearer {key}"}
    return {}
