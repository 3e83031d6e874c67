"""The chat server: nanochat's streaming protocol over HTTP, and one page to talk to.

    POST /chat/completions   a conversation (see `schema`) in, server-sent events out:
                             data: {"token": "...", "gpu": 0}   ...   data: {"done": true}
    GET  /health             {"status": "ok", "ready": true, "model", "running", "waiting"}
    GET  /                   the page

A refusal is {"detail": "..."} with status 400 (over a limit), 413 (too big), 422 (not of the form)
or 503 (too many requests wait; Retry-After says when to come back). What people write is neither
logged nor repeated.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse

from nanochat_core.engine.engine import Engine
from nanochat_core.server.generation import Ask, Busy, Generation
from nanochat_core.server.schema import (
    MAX_BODY_BYTES,
    ChatRequest,
    RequestError,
    parse_chat_request,
    too_big,
)
from nanochat_core.tokenizer.chat import render_for_completion

RETRY_AFTER_SECONDS = 5
ANSWER_SHARE = 4  # a quarter of the context is kept for the answer, if it may be that long
PAGE = Path(__file__).with_name("ui.html")
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# The page loads nothing from anywhere and talks to this server only.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def make_app(engine: Engine, *, name: str, max_waiting: int = 16) -> FastAPI:
    """The server of one model, called `name` on the page and in /health."""
    app = FastAPI(title=name, docs_url=None, redoc_url=None, openapi_url=None)
    generation = Generation(engine, max_waiting=max_waiting)
    page = PAGE.read_text(encoding="utf-8")

    @app.get("/")
    async def show_page() -> HTMLResponse:
        return HTMLResponse(page, headers=PAGE_HEADERS)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {
            "status": "ok",
            "ready": True,
            "model": name,
            "running": generation.running,
            "waiting": generation.waiting,
        }

    @app.post("/chat/completions")
    async def chat_completions(request: Request) -> StreamingResponse:
        chat = parse_chat_request(await _read_body(request))
        ask = await asyncio.to_thread(_ask, engine, chat)
        events = _events(generation.stream(ask))
        return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=error.status)

    @app.exception_handler(Busy)
    async def refuse_busy(request: Request, error: Busy) -> JSONResponse:
        return JSONResponse(
            {"detail": "too many requests are waiting; try again in a moment"},
            status_code=503,
            headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
        )

    @app.exception_handler(RequestValidationError)
    async def refuse_form(request: Request, error: RequestValidationError) -> JSONResponse:
        # FastAPI's own answer repeats the input.
        return JSONResponse({"detail": "the request is not of the expected form"}, status_code=422)

    return app


async def _read_body(request: Request) -> bytes:
    """The body, read no further than its limit."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise too_big()
    return bytes(body)


def _ask(engine: Engine, chat: ChatRequest) -> Ask:
    """The conversation as tokens, its oldest turns left out when the context is too short for all.

    Raises RequestError when the last message alone does not fit.
    """
    context = engine.model.config.sequence_len
    wanted = min(chat.max_tokens, context // ANSWER_SHARE)
    messages = list(chat.messages)
    first = 1 if messages[0]["role"] == "system" else 0
    while True:
        prompt = render_for_completion(engine.tokenizer, {"messages": messages})
        if len(prompt) + wanted <= context or len(messages) == first + 1:
            break
        del messages[first : first + 2]
    if len(prompt) >= context:
        raise RequestError(
            400,
            f"the last message is too long: {len(prompt)} tokens, the model reads {context - 1}",
        )
    return Ask(
        prompt=prompt,
        temperature=chat.temperature,
        top_k=chat.top_k,
        max_tokens=chat.max_tokens,
        seed=secrets.randbits(62),
    )


async def _events(pieces: AsyncIterator[str]) -> AsyncIterator[str]:
    async for piece in pieces:
        yield _event({"token": piece, "gpu": 0})
    yield _event({"done": True})


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
