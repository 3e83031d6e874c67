"""Bodies in, streams and refusals out, each in the shape of the API that was asked."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from nanochat_core.server.api.schema import MAX_BODY_BYTES, RequestError, too_big

RETRY_AFTER_SECONDS = 2
PING = ": ping\n\n"
FAILURES = (500, 504)  # of an answer that was begun: OpenAI's library would repeat it at once
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    500: "server_error",
    503: "overloaded_error",
    504: "server_error",
}


async def read_body(request: Request) -> bytes:
    """The body, read no further than its limit. Raises RequestError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # also keeps out what a foreign page may send unasked
        raise RequestError(415, "the content-type must be application/json")
    if "content-length" in request.headers and "transfer-encoding" in request.headers:
        # A proxy in front may believe the other of the two, and see another request in the body.
        raise RequestError(400, "content-length and transfer-encoding exclude each other")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise too_big()
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
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """An error as the API at `path` tells it: OpenAI's below /v1, else {"detail": "..."}."""
    if status == 503:
        headers = {**(headers or {}), "Retry-After": str(RETRY_AFTER_SECONDS)}
    if status in FAILURES:
        headers = {**(headers or {}), "x-should-retry": "false"}
    if not path.startswith("/v1"):
        return JSONResponse({"detail": message}, status_code=status, headers=headers)
    status = 400 if status == 422 else status  # OpenAI knows no 422
    error = openai_error(message, openai_type(status), param=param)
    return JSONResponse(error, status_code=status, headers=headers)


def openai_type(status: int) -> str:
    """What OpenAI calls an error of this status."""
    return _TYPES.get(status, "invalid_request_error")


def openai_error(message: str, kind: str, *, param: str | None = None) -> dict[str, Any]:
    """An error object of OpenAI's."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def event(value: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False)}\n\n"


class EventStream(Response):
    """Server-sent events. `on_end` is called once, as soon as the client is gone or all is sent."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[str], *, on_end: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        gone = asyncio.create_task(_when_gone(receive, self._on_end))
        try:
            await send(start)
            async for chunk in self._chunks:
                # What cannot be said in UTF-8 is half a character of somebody's prompt.
                data = chunk.encode("utf-8", "replace")
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            self._on_end()


async def while_listening(
    request: Request, work: Awaitable[Response], *, on_gone: Callable[[], None]
) -> Response:
    """The response of `work`; `on_gone` is called as soon as the client is gone."""
    gone = asyncio.create_task(_when_gone(request.receive, on_gone))
    try:
        return await work
    finally:
        gone.cancel()


async def _when_gone(receive: Receive, call: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    call()
