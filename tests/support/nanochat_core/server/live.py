"""A real server on a free port of this machine, in a thread, with the engine that has no model."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvloop

from nanochat_core.server.config import ServerConfig
from nanochat_core.server.launch import Engines, make_specs, open_port
from nanochat_core.server.metrics import Metrics
from nanochat_core.server.serve import Server
from nanochat_core.server.service import Service
from nanochat_core.server.workers.pool import Pool
from tests.support.nanochat_core.server.byte_tokenizer import TOKENIZER

FAKE = "tests.support.nanochat_core.server.fake_engine:open_fake"
NAME = "tiny"
PATIENCE = 120.0  # seconds, which bound a hang
HEAD = b"POST /chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@dataclass(frozen=True)
class Live:
    url: str
    port: int
    service: Service
    loop: asyncio.AbstractEventLoop
    server: Server

    def client(self, **options) -> httpx.Client:
        """Of its own connections."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE, **options)

    def ask(self, text: str, **settings) -> list[dict]:
        """What is streamed in answer to one message."""
        with self.client() as http:
            response = http.post("/chat/completions", json=body(text, **settings))
        assert response.status_code == 200, response.text
        return events_of(response.text)

    @contextlib.contextmanager
    def answering(self, text: str = "hold", **settings) -> Iterator[Iterator[str]]:
        """Begin an answer and leave it at the end of the block: the lines after its first."""
        with (
            self.client() as http,
            http.stream("POST", "/chat/completions", json=body(text, **settings)) as answer,
        ):
            lines = answer.iter_lines()  # dropping it would close the connection
            next(lines)
            yield lines

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers, timeout=PATIENCE)

    def post(self, path: str = "/chat/completions", ask: dict | None = None) -> httpx.Response:
        """Post a request, by default one of a short answer."""
        return httpx.post(self.url + path, json=ask or body(), timeout=PATIENCE)

    def connect(self, *, buffer: int | None = None) -> socket.socket:
        """Open a connection, whose system buffers that many bytes of what it does not read."""
        connection = socket.socket()
        if buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.settimeout(PATIENCE)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def health(self) -> dict:
        return httpx.get(f"{self.url}/health", timeout=PATIENCE).json()

    @property
    def running(self) -> int:
        return self.service.running

    def count(self, name: str, **labels: str) -> float:
        return self.service.metrics.registry.get_sample_value(name, labels) or 0.0

    def run(self, coroutine):
        """A coroutine's result, run in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE)


def fake_pool(directory: str = "fake", *, max_waiting: int = 64, **engines) -> Pool:
    """A pool of engines that have no model; not started."""
    given = Engines(device="cpu", maker=FAKE, **engines)
    specs = make_specs(Path(directory), given)
    return Pool(specs, TOKENIZER, max_waiting=max_waiting, timeouts=given.timeouts)


@contextlib.contextmanager
def serving(rules: ServerConfig | None = None, **engines) -> Iterator[Live]:
    """A server as long as the block lasts."""
    rules = rules or ServerConfig(log="none")
    started: list[Live] = []
    ready = threading.Event()

    async def run(listener: socket.socket) -> None:
        pool = fake_pool(max_waiting=rules.max_waiting, **engines)
        await pool.start()
        service = Service(pool, name=NAME, rules=rules, metrics=Metrics())
        server = Server(service)
        port = listener.getsockname()[1]
        loop = asyncio.get_running_loop()
        started.append(Live(f"http://127.0.0.1:{port}", port, service, loop, server))
        ready.set()
        try:
            await server.serve(sockets=[listener])
        finally:
            await service.stop()

    with open_port("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=lambda: uvloop.run(run(listener)))
        thread.start()
        assert ready.wait(PATIENCE)
        try:
            yield started[0]
        finally:
            started[0].server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive()


def body(text: str = "echo hello", **settings) -> dict:
    return {"messages": [{"role": "user", "content": text}], **settings}


def raw(ask: dict, path: bytes = b"/chat/completions") -> bytes:
    """Return the bytes of a request."""
    content = json.dumps(ask).encode()
    head = HEAD.replace(b"/chat/completions", path)
    return head + b"Content-Length: %d\r\n\r\n" % len(content) + content


def received(connection: socket.socket) -> bytes:
    """Return all that comes until the server ends the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            found += part
    return found


def events_of(text: str) -> list[dict]:
    """The events of a stream, comments left out."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    blocks = [block for block in blocks if not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block[len("data: ") :]) for block in blocks]


def text_of(events: list[dict]) -> str:
    return "".join(event.get("token", "") for event in events)


def wait_until(condition: Callable[[], bool], *, seconds: float = PATIENCE) -> None:
    """Return when `condition()` holds; fail after `seconds`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds
        time.sleep(0.005)
