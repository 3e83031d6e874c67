"""Address, password and database of the Prefect server, and plain requests to its API.

Three values are secret: NANOCHAT_PREFECT_AUTH, "user:password" of the server,
NANOCHAT_PREFECT_DATABASE, the URL of its Postgres database, and NANOCHAT_WEBHOOK, an address to
which any client that knows it may post. They come from the environment (the first one, for a local
server, from the home: infra/prefect/password.py) and go to the environment of processes that need
them; they never appear on a command line, in a record or in a log.
"""

import asyncio
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

AUTH = "NANOCHAT_PREFECT_AUTH"
DATABASE = "NANOCHAT_PREFECT_DATABASE"
WEBHOOK = "NANOCHAT_WEBHOOK"
SQLITE = "sqlite"  # a file in the home: the default when no database is named
_DRIVER = "postgresql+asyncpg"
_THIS_MACHINE = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d*)?")  # host and port of a URL


class ServerError(NanochatError):
    """An error of starting or reaching the Prefect server, or of its database."""


def configured_api_url() -> str | None:
    """Return the shared Prefect server to use (PREFECT_API_URL), or None for a local one."""
    return os.environ.get("PREFECT_API_URL", "").rstrip("/") or None


def configured_webhook() -> str | None:
    """Return NANOCHAT_WEBHOOK, the address that alerts are posted to, or None for no alerts."""
    return os.environ.get(WEBHOOK) or None


def auth() -> str | None:
    """Return `user:password` of the server, or None if none is set. Raises ServerError."""
    given = os.environ.get(AUTH) or None
    if given is not None and not all(given.partition(":")):
        raise ServerError(f"{AUTH} is not user:password", hint="for example nanochat:a-long-secret")
    return given


def database() -> str | None:
    """Return the URL of the server's Postgres database as Prefect wants it, or None for SQLite.

    Raises ServerError if the value is not the URL of a Postgres database.
    """
    given = os.environ.get(DATABASE)
    if not given:
        return None
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(given)
    except (ArgumentError, ValueError):
        url = None
    if url is None or url.drivername not in ("postgresql", "postgres", _DRIVER):
        raise ServerError(
            "the database is not given as the URL of a Postgres database",
            hint="for example postgresql://prefect@db.example.org:5432/prefect; without one the "
            "history is kept in the home",
        )
    query = dict(url.query)
    # Postgres's own name of the option, which the driver asyncpg does not know.
    if "sslmode" in query:
        query["ssl"] = query.pop("sslmode")
    url = url.set(drivername=_DRIVER, query=query)
    return url.render_as_string(hide_password=False)


def shown_database(url: str | None) -> str:
    """Return a database's URL without its password, to show to a person."""
    from sqlalchemy.engine import URL, make_url

    if url is None:
        return SQLITE
    whole = make_url(url)
    shown = URL.create(
        "postgresql",
        username=whole.username,
        host=whole.host,
        port=whole.port,
        database=whole.database,
    )
    return shown.render_as_string()


def check_database(url: str) -> None:
    """Raise ServerError unless the database accepts a connection."""
    from sqlalchemy.exc import SQLAlchemyError

    try:
        asyncio.run(_connect(url))
    except (OSError, SQLAlchemyError, ValueError, TypeError) as error:
        raise _unreachable(url, error) from error
    # The driver's own errors are recognised by their module: asyncpg is not imported here.
    except Exception as error:
        if not type(error).__module__.startswith("asyncpg"):
            raise
        raise _unreachable(url, error) from error


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
        + (f"refuses {AUTH}" if auth() else "asks for a password"),
        hint=f"set {AUTH} to the user:password that it was started with",
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
    # Ours first, then Prefect's own variable, then the key of Prefect Cloud.
    if given := auth() or os.environ.get("PREFECT_API_AUTH_STRING"):
        return {"Authorization": f"Basic {base64.b64encode(given.encode()).decode()}"}
    if key := os.environ.get("PREFECT_API_KEY"):
        return {"Authorization": f"Bearer {key}"}
    return {}


async def _connect(url: str) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(url)
    try:
        async with asyncio.timeout(ANSWER_SECONDS), engine.connect():
            pass
    finally:
        await engine.dispose()


def _unreachable(url: str, error: Exception) -> ServerError:
    what = (str(error).splitlines() or [""])[0] or type(error).__name__
    if isinstance(error, OSError) and (error.errno or 0) > 0:
        # The text of asyncio's errors has the number only.
        what = os.strerror(error.errno or 0).lower()
    return ServerError(
        f"the database {shown_database(url)} cannot be used: {what}",
        hint=f"look at host, port, user, password and name in {DATABASE}",
    )
