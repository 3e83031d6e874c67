"""A chat server that answers byte by byte as a test says; the page sees no difference."""

import asyncio
import json
import socket
import threading
from collections import deque
from typing import Any, TypeAlias

import uvicorn

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

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI application."""
        assert scope["type"] == "http"
        path = scope["path"]
        if path == "/":
            headers = {"content-type": "text/html", "content-security-policy": page_csp()}
            await _respond(send, 200, page_html().encode(), headers)
        elif path == "/stats" and self.stats is not None:
            await _respond(send, 200, json.dumps(self.stats).encode(), {})
        elif path == "/chat/completions":
            await self._chat(scope, receive, send)
        else:
            await _respond(send, 404, b"{}", {})

    async def _chat(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message.get("more_body", False)
        self.asked.append(json.loads(body))
        question = self.asked[-1]["messages"][-1]["content"]
        reply = self.replies.popleft() if self.replies else answer(f"You said: {question}")
        if isinstance(reply, dict):
            await _respond(
                send, reply["status"], json.dumps(reply["body"]).encode(), reply["headers"]
            )
            return
        watch = asyncio.create_task(self._watch(receive))
        try:
            await self._stream(reply, send)
        finally:
            watch.cancel()

    async def _stream(self, reply: list[Step], send: Any) -> None:
        await _start(send, 200, {"content-type": "text/event-stream"})
        for step in reply:
            if isinstance(step, bytes):
                await send({"type": "http.response.body", "body": step, "more_body": True})
            elif isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, threading.Event):
                while not step.is_set() and not self.left.is_set():
                    await asyncio.sleep(0.005)
            else:
                raise ConnectionResetError  # uvicorn drops the connection
        await send({"type": "http.response.body", "body": b""})

    async def _watch(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()


class RunningServer:
    """Serves `server` on a free port, in a thread, until closed."""

    def __init__(self, server: ScriptedServer) -> None:
        config = uvicorn.Config(server.app, interface="asgi3", log_level="critical", lifespan="off")
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


async def _start(send: Any, status: int, headers: dict[str, str]) -> None:
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


async def _respond(send: Any, status: int, body: bytes, headers: dict[str, str]) -> None:
    await _start(send, status, headers)
    await send({"type": "http.response.body", "body": body})
