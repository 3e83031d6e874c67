"""A chat server that answers byte by byte as a test says; the page sees no difference."""

import asyncio
import json
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nanochat_core.server.page.page import page_csp, page_html

CUT = "cut"  # the connection breaks here
STATS = {
    "model": "sft@tiny",
    "parameters": 1_923_840,
    "context": 512,
    "defaults": {"temperature": 0.8, "top_k": 50, "max_tokens": 256},
    "limits": {"messages": [1, 500], "message_characters": [1, 8000]},
}
# Bytes to send, seconds to wait, an event that the test sets, or CUT.
Step: TypeAlias = bytes | float | threading.Event | str


def event(**values: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(values, ensure_ascii=False).encode() + b"\n\n"


def answer(text: str, *, size: int = 5, **usage: Any) -> list[Step]:
    """A whole answer of `text`, some letters a token."""
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    numbers = {"prompt_tokens": 9, "completion_tokens": len(pieces), "seconds": 0.5}
    end = {**numbers, "finish_reason": "stop", **usage}
    tokens = [event(token=piece, gpu=0) for piece in pieces]
    return [*tokens, event(usage=end), event(done=True)]


def refusal(status: int, detail: str, **headers: str) -> dict[str, Any]:
    """An answer that is none: a status, and {"detail": detail}."""
    return {"status": status, "body": {"detail": detail}, "headers": headers}


class ScriptedServer:
    """Gives each request the next of `replies`, or an echo, and keeps what was asked."""

    def __init__(self) -> None:
        self.replies: deque[list[Step] | dict[str, Any]] = deque()
        self.asked: list[dict[str, Any]] = []
        self.left = threading.Event()  # a client went away before its answer ended
        self.stats: dict[str, Any] | None = STATS
        self.url = ""
        self.on_refusal: Callable[[], None] = lambda: None  # of a reply that is one

    async def show_page(self, request: Request) -> Response:
        return HTMLResponse(page_html(), headers={"content-security-policy": page_csp()})

    async def show_stats(self, request: Request) -> Response:
        return JSONResponse(self.stats, 404 if self.stats is None else 200)

    async def chat(self, request: Request) -> Response:
        self.asked.append(await request.json())
        question = self.asked[-1]["messages"][-1]["content"]
        reply = self.replies.popleft() if self.replies else answer(f"You said: {question}")
        if isinstance(reply, dict):
            self.on_refusal()
            return JSONResponse(reply["body"], reply["status"], reply["headers"])
        return StreamingResponse(self._stream(reply), media_type="text/event-stream")

    async def _stream(self, reply: list[Step]) -> AsyncIterator[bytes]:
        try:
            for step in reply:
                if isinstance(step, bytes):
                    yield step
                elif isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, threading.Event):
                    while not step.is_set():
                        await asyncio.sleep(0.005)
                else:
                    raise ConnectionResetError  # uvicorn drops the connection
        except asyncio.CancelledError:
            self.left.set()
            raise


class RunningServer:
    """Serves `server` on a free port, in a thread, until closed."""

    def __init__(self, server: ScriptedServer) -> None:
        routes = [
            Route("/", server.show_page),
            Route("/stats", server.show_stats),
            Route("/chat/completions", server.chat, methods=["POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off")
        self._uvicorn = uvicorn.Server(config)
        self._listener = socket.create_server(("127.0.0.1", 0))
        server.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(
            target=self._uvicorn.run, kwargs={"sockets": [self._listener]}, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop, without waiting for answers under way, and wait for the end of the thread."""
        self._uvicorn.should_exit = self._uvicorn.force_exit = True
        self._thread.join()
        self._listener.close()
