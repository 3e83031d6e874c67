"""Hostile requests, clients that leave, and more clients than the chat server can take."""

import asyncio
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

from tests.support.nanochat_core.server.fake_engine import SECONDS_PER_STEP
from tests.support.nanochat_core.server.live import body, wait_until
from tests.support.nanochat_core.server.process import serving_apart
from tests.support.reliability.server_fuzz import fire_many

TOKENS = 200  # of an answer under overload
SLACK = 48 * 2**20  # bytes: what caches and the allocator take, however many requests come


def fuzz(seeds: range) -> str:
    """Send the requests of these seeds; return how it went. Fails on an answer that is wrong."""
    with serving_apart(max_waiting=16) as server, ThreadPoolExecutor(8) as threads:
        canaries: set[str] = set()
        warm = seeds[: min(len(seeds) // 4, 2000)]
        first, wrong = fire_many(server.port, threads, warm, canaries)
        assert wrong == []
        before = server.memory
        rest, wrong = fire_many(server.port, threads, seeds[len(warm) :], canaries)
        assert wrong == []
        grown = server.memory - before
        wait_until(lambda: server.is_idle)
        assert [worker["restarts"] for worker in server.get("/stats")["workers"]] == [0]
    brought = first + rest
    assert brought > len(seeds) / 100
    assert grown < SLACK, f"{grown / 2**20:.1f} MB more after {len(seeds)} requests"
    return f"{brought:,} of {len(seeds):,} requests brought their canary, none another's"


def disconnect(seeds: range, **patience: float) -> None:
    """Let a client leave for each seed; fail if slots are not free soon after the last."""

    async def leave(seed: int) -> None:
        rng = random.Random(seed)
        await asyncio.sleep(rng.uniform(0, len(seeds) / 150))
        reader, writer = await ask(server.port, "long", max_tokens=4000)
        for _ in range(rng.randint(0, 40)):
            await reader.readline()
        await asyncio.sleep(rng.uniform(0, 0.2))
        writer.transport.abort() if rng.random() < 0.5 else writer.close()

    async def all_leave() -> None:
        await asyncio.gather(*map(leave, seeds))

    with serving_apart(max_waiting=600) as server:
        asyncio.run(all_leave())
        wait_until(lambda: server.is_idle, **patience)


async def ask(port: int, text: str, **settings):
    """A request on a connection of its own."""
    content = json.dumps(body(text, **settings))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n"
    )
    head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    writer.write((head + content).encode())
    return reader, writer


def overload(seconds: float) -> tuple[dict[str, int], list[float]]:
    """Ask for ten times what the server can take; return the ends and the seconds of /health."""
    slots, waiting = 4, 4
    counts = dict.fromkeys(("done", "busy", "error"), 0)
    healths: list[float] = []

    async def client(port: int) -> None:
        reader, writer = await ask(port, "long", max_tokens=TOKENS)
        text = await reader.read()
        writer.close()
        status = int(text.split(b" ", 2)[1])
        assert status in (200, 503), text[:300]
        if status == 503:
            assert b"retry-after" in text.lower()
            counts["busy"] += 1
        else:
            assert text.endswith(b'data: {"done": true}\n\n\r\n0\r\n\r\n'), text[-300:]
            counts["done" if b'"usage"' in text else "error"] += 1

    async def watch(port: int, until: float) -> None:
        while time.monotonic() < until:
            began = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            assert b"200 OK" in await reader.read()
            writer.close()
            healths.append(time.monotonic() - began)
            await asyncio.sleep(0.02)

    async def send_all(port: int) -> None:
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as clients:
            clients.create_task(watch(port, until))
            while time.monotonic() < until:
                clients.create_task(client(port))
                await asyncio.sleep(TOKENS * SECONDS_PER_STEP / slots / 10)

    with serving_apart(slots=slots, max_waiting=waiting) as server:
        asyncio.run(send_all(server.port))
        wait_until(lambda: server.is_idle)
    assert counts["done"] > 0
    assert counts["busy"] > 0
    assert counts["error"] == 0
    return counts, sorted(healths)
