"""Middleware of all routes: checks the host name and the API key, counts and logs each request, and
adds the security headers.
"""

import base64
import binascii
import hmac
import logging
import re
import time
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanochat_core.server.api.http import refusal
from nanochat_core.server.service import GenerationStream, Service

SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_OPEN = "/health"  # needs no key
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"}
_PORT = re.compile(r":[0-9]*$")
_LOG = logging.getLogger("nanochat_core.server.access")


class Guard:
    """ASGI middleware in front of `app`, the server's routes."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        rules = service.rules
        self._keys = [key.encode() for key in rules.keys]
        self._hosts = {host.lower() for host in rules.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the app, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = 0  # stays 0 if the client disconnects before a response begins

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], *SECURITY_HEADERS]}
            await send(message)

        method = scope["method"] if scope["method"] in _METHODS else "other"  # may be anything
        if method == "HEAD":  # every GET route answers it; uvicorn sends no body
            scope = {**scope, "method": "GET"}
        headers = Headers(scope=scope)
        path = scope["path"]
        app = self._app
        client = self._client(headers)
        # Clients with different keys share no cached pages; without keys there is one client.
        scope.setdefault("state", {})["cache_salt"] = client or 0
        if "content-length" in headers and "transfer-encoding" in headers:
            # Request smuggling: a proxy in front may go by the other of the two, and see a second
            # request in the body. So nothing more of this connection is read.
            why = "content-length and transfer-encoding exclude each other"
            app = refusal(path, 400, why, headers={"Connection": "close"})
        elif not self._is_ours(headers.get("host", "")):
            why = "this server does not go by that host name; --trusted-host NAME adds one"
            app = refusal(path, 400, why)
        elif path != _OPEN and self._keys and client is None:
            # Basic makes a browser that opens the page ask for a password; programs send Bearer.
            wants_page = "text/html" in headers.get("accept", "")
            asks = 'Basic realm="nanochat"' if wants_page else "Bearer"
            app = refusal(
                path,
                401,
                "this server needs its API key",
                headers={"WWW-Authenticate": asks},
            )
        try:
            await app(scope, receive, send_guarded)
        finally:
            self._note(scope, method, status, time.monotonic() - began)

    def _is_ours(self, host: str) -> bool:
        return not self._hosts or _PORT.sub("", host).strip("[]").lower() in self._hosts

    def _client(self, headers: Mapping[str, str]) -> int | None:
        """Return the index of the key that a request has, None if it has none.

        OpenAI's clients send it as Bearer; a browser as the password of Basic authentication.
        """
        kind, _, given = headers.get("authorization", "").partition(" ")
        # Header values are latin-1. What that cannot encode is no key: keys are ASCII.
        key = given.strip().encode("latin-1", "replace")
        if kind.lower() == "basic":
            try:
                key = base64.b64decode(key, validate=True).partition(b":")[2]
            except binascii.Error:
                return None
        elif kind.lower() != "bearer":
            return None
        # All keys are compared, in constant time each: the response time reveals nothing of them.
        found = [i for i, ours in enumerate(self._keys) if hmac.compare_digest(key, ours)]
        return found[0] if found else None

    def _note(self, scope: Scope, method: str, status: int, seconds: float) -> None:
        # The route and not the path: clients choose the path, and could fill the log and the
        # metrics' labels with it.
        route = getattr(scope.get("route"), "path", "other")
        metrics = self._service.metrics
        metrics.requests.labels(route, str(status)).inc()
        if 400 <= status < 500 or status == 503:
            metrics.refusals.inc()
        if self._service.rules.log == "none":
            return
        generation: GenerationStream | None = scope.get("state", {}).get("generation")
        tokens = ""
        if generation:
            tokens = f" {generation.prompt_tokens}+{generation.completion_tokens} tokens"
        client = scope["client"][0] if scope.get("client") else "-"
        _LOG.info("%s %s %s %d%s %.3f s", client, method, route, status, tokens, seconds)
