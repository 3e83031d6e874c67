"""Request bodies, event streams and error responses, each in the shape of its API."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from nanochat_core.server.api.schema import MAX_BODY_BYTES, RequestError, too_big

RETRY_AFTER_SECONDS = 2
PING = ": ping\n\n"
FAILURES = (500, 504)  # of an answer that was begun: OpenAI's library would retry it at once
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    500: "server_error",
    503: "overloaded_error",
    504: "server_error",
}


async def read_body(request: Request) -> bytes:
    """Read the request's body, at most MAX_BODY_BYTES of it. Raises RequestError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Also against cross-site requests: without a preflight a page cannot send this type.
    if kind != "application/json":
        raise RequestError(415, "the content-type must be application/json")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise too_big()
    # Counted again while it is read: a chunked body declares no length.
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise too_big()
    except ClientDisconnect:
        raise RequestError(400, "the body ended early") from None
    return bytes(body)


def refusal(
    path: str,
    status: int,
    message: str,
    *,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return an error response in the shape of the API at `path`: OpenAI's below /v1, else
    {"detail": "..."}."""
    headers = dict(headers or {})
    if status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if status in FAILURES:
        headers["x-should-retry"] = "false"
    if not path.startswith("/v1"):
        return JSONResponse({"detail": message}, status_code=status, headers=headers)
    status = 400 if status == 422 else status  # OpenAI knows no 422
    error = openai_error(message, status, param=param)
    return JSONResponse(error, status_code=status, headers=headers)


def openai_error(message: str, status: int, *, param: str | None = None) -> dict[str, Any]:
    """Return an error object of OpenAI's, with its type for errors of this status."""
    kind = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def event(value: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False)}\n\n"


class EventStream(StreamingResponse):
    """Server-sent events. `on_end` is called as soon as the client is gone or all is sent."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[str], *, on_end: Callable[[], None]) -> None:
        # A lone surrogate, as JSON from a client may hold, becomes "?".
        data = (chunk.encode("utf-8", "replace") async for chunk in chunks)
        # X-Accel-Buffering: nginx would hold events back.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(data, headers=headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come."""
        # Here and not in the generator, which may never have begun.
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def while_listening(
    request: Request, work: Awaitable[Response], *, on_gone: Callable[[], None]
) -> Response:
    """Return the response of `work`; `on_gone` is called as soon as the client disconnects."""

    async def listen() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        on_gone()

    # The body has been read: all that `receive` can still return is the disconnect.
    listening = asyncio.create_task(listen())
    try:
        return await work
    finally:
        listening.cancel()
