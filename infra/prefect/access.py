"""Plain requests to the API of the Prefect server, with its password.

PREFECT_API_URL names a shared server and PREFECT_API_AUTH_STRING is its "user:password"
(PREFECT_API_KEY, a key of Prefect Cloud): Prefect's own settings. The password of a home's own
server is in the home: infra/prefect/server.py. It is secret, and so is NANOCHAT_WEBHOOK, an address
to which any client that knows it may post: they go to the environment of processes that need them
and never appear on a command line, in a record or in a log.
"""

import functools
import os
import uuid
from http import HTTPStatus
from typing import Any

import httpx

from infra.polling import ANSWER_SECONDS
from nanochat_core.errors import ConfigError, NanochatError

AUTH = "PREFECT_API_AUTH_STRING"
WEBHOOK = "NANOCHAT_WEBHOOK"
HOST = "127.0.0.1"
# No answer, or none of Prefect's: another program's, or a proxy's.
NO_ANSWER = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, LookupError, TypeError)
_BUSY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)
_NOT_ADMITTED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_MAX_SHOWN = 500  # characters of the server's message that an error shows


class ServerError(NanochatError):
    """An error of starting or reaching the Prefect server."""


def configured_api_url() -> str | None:
    """Return PREFECT_API_URL, or None. `server.shared_server` says whether it is a shared one."""
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
    one of NO_ANSWER without an answer of Prefect's, httpx.HTTPStatusError if it refuses.
    """
    headers = {} if body is None else _csrf_headers(api_url)
    user, _, password = os.environ.get(AUTH, "").partition(":")
    if not user and (key := os.environ.get("PREFECT_API_KEY")):
        headers["Authorization"] = f"Bearer {key}"
    answer = client().request(
        method or ("GET" if body is None else "POST"),
        f"{api_url}{path}",
        json=body,
        headers=headers,
        auth=(user, password) if user else None,
        timeout=ANSWER_SECONDS,
    )
    if may_lack and answer.status_code == HTTPStatus.NOT_FOUND:
        return None
    answer.raise_for_status()
    return answer.json() if answer.content else None


@functools.cache
def client() -> httpx.Client:
    """Return this process's HTTP client, made as Prefect makes its own.

    Raises ServerError if the environment keeps it from being made.
    """
    # Both spellings: where both are set, Python reads the lower one. "*" next to another name would
    # mean nothing.
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if given != "*":
        given = ",".join(dict.fromkeys([*filter(None, given.split(",")), HOST, "localhost"]))
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = given
    try:
        # A connection for each request: a server closes idle ones just when the next is sent.
        return httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))
    except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
        raise ServerError(
            f"Prefect's client cannot be made: {error}",
            hint="check HTTPS_PROXY, HTTP_PROXY, ALL_PROXY (http, https, socks5 or socks5h), "
            "NO_PROXY and SSL_CERT_FILE",
        ) from error


def _csrf_headers(api_url: str) -> dict[str, str]:
    """Return the headers that CSRF protection requires of each change: a token from the server."""
    sender = uuid.uuid4().hex
    try:
        token = ask(api_url, f"/csrf-token?client={sender}")["token"]
    except httpx.HTTPStatusError as error:
        if error.response.status_code in (404, 422):  # no such protection, or switched off
            return {}
        raise
    return {"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": sender}


def find_refusal(error: Exception) -> ConfigError | None:
    """Return the error of a request that the server refuses, and would refuse again; else None."""
    if not isinstance(error, httpx.HTTPStatusError):
        return None
    response = error.response
    if response.is_server_error or response.status_code in _BUSY:
        return None
    text = response.text
    try:
        tree = response.json()
        text = str(tree.get("detail") or tree.get("exception_detail") or text)
    except (ValueError, AttributeError):  # not JSON, or no object
        pass
    message = " ".join(text.split())[:_MAX_SHOWN] or response.reason_phrase
    return ConfigError(
        f"Prefect refuses ({response.status_code}): {message}",
        hint=f"set {AUTH} as it is set for the server"
        if response.status_code in _NOT_ADMITTED
        else "if its deployments are missing or of another version: `nanochat up --register`",
    )


def is_prefect(api_url: str) -> bool:
    """Return whether a Prefect server answers; raise ServerError if it refuses our password.

    So neither another program nor another server on the port of a home passes for its own.
    """
    try:
        # Prefect's health endpoint needs no password, and another program must not get ours. A
        # proxy before a shared server may ask for one.
        health = client().get(f"{api_url}/health", timeout=ANSWER_SECONDS)
        is_healthy = health.is_success and health.json() is True
        if not is_healthy and health.status_code not in _NOT_ADMITTED:
            return False
        ask(api_url, "/admin/version")
    except httpx.HTTPStatusError as error:
        if error.response.status_code not in _NOT_ADMITTED:
            return not error.response.is_server_error
        given = f"refuses {AUTH}" if os.environ.get(AUTH) else "asks for a password"
        raise ServerError(
            f"the Prefect server at {api_url} {given}", hint=f"set {AUTH} to its user:password"
        ) from None
    except NO_ANSWER:
        return False
    return True


def check_answers(api_url: str) -> None:
    """Raise ServerError unless a Prefect server answers at `api_url` and accepts our password."""
    if not is_prefect(api_url):
        raise ServerError(
            f"no Prefect server answers at {api_url}",
            hint="without PREFECT_API_URL a local one is used and started by itself"
            if api_url == configured_api_url()
            else "it needs some ten seconds to start; `nanochat down` ends one that hangs",
        )
