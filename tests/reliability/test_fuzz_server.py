"""The chat server against hostile requests, clients that leave, and more of them than it can take.

The slow campaigns are run by hand: pytest tests/reliability/test_fuzz_server.py -m slow -s
Environment: FUZZ_REQUESTS, OVERLOAD_SECONDS.
"""

import asyncio
import json
import os
import random
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.nanochat_core.server.fake_engine import SECONDS_PER_STEP
from tests.nanochat_core.server.live import body, wait_until
from tests.nanochat_core.server.process import serving_apart
from tests.reliability.server_fuzz import Shot, complaint, fire_many

FEW, MANY = 400, int(os.environ.get("FUZZ_REQUESTS", "100000"))
OVERLOAD_SECONDS = float(os.environ.get("OVERLOAD_SECONDS", "600"))
LEAKY = "tests.nanochat_core.server.fake_engine:open_leaky"
TOKENS = 200  # of an answer under overload
SLACK = 48 * 2**20  # bytes: what caches and the allocator take, however many requests come


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.timeout(7200)
def test_no_request_breaks_the_server_or_sees_another(count):
    with serving_apart(max_waiting=16) as server, ThreadPoolExecutor(8) as threads:
        canaries: set[str] = set()
        warm = min(count // 4, 2000)
        first = fire_many(server.port, threads, range(warm), canaries)
        assert first.wrong == []
        before = server.memory
        rest = fire_many(server.port, threads, range(warm, count), canaries)
        assert rest.wrong == []
        grown = server.memory - before
        wait_until(lambda: server.is_idle)
        assert [worker["restarts"] for worker in server.get("/stats")["workers"]] == [0]
    brought = first.brought + rest.brought
    sys.stdout.write(f"{brought} of {count} brought their canary\n")
    assert brought > count / 100
    assert grown < SLACK, f"{grown / 2**20:.1f} MB more after {count} requests"


def test_an_engine_that_mixes_up_requests_now_and_then_is_found():
    with serving_apart(maker=LEAKY) as server, ThreadPoolExecutor(8) as threads:
        volley = fire_many(server.port, threads, range(2 * FEW), set())
    assert any(re.search(r"canary[0-9a-f]{16} of another request", what) for what in volley.wrong)


def test_a_stream_is_searched_as_a_whole():
    canary, own = f"canary{1:016x}", f"canary{2:016x}"
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    events = [b'data: {"token": "%c", "gpu": 0}\n\n' % letter for letter in canary.encode()]
    stream = head + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
    shot = Shot(
        pieces=[], canary=own, leaves=False, half_closes=False, must_answer=True, brings=True
    )
    assert complaint(shot, stream, {canary, own}) == f"{canary} of another request came back"
    assert "without its own canary" in str(complaint(shot, stream, {own}))
    assert complaint(shot, b"", {own}) == "no answer"


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_slots_are_free_within_a_second_of_the_last_disconnect(count):
    async def leave(number: int) -> None:
        rng = random.Random(number)
        await asyncio.sleep(rng.uniform(0, count / 150))
        reader, writer = await ask(server.port, "long", max_tokens=4000)
        for _ in range(rng.randint(0, 40)):
            await reader.readline()
        await asyncio.sleep(rng.uniform(0, 0.2))
        writer.transport.abort() if rng.random() < 0.5 else writer.close()

    async def all_leave() -> None:
        await asyncio.gather(*map(leave, range(count)))

    with serving_apart(max_waiting=600) as server:
        asyncio.run(all_leave())
        wait_until(lambda: server.is_idle, seconds=1.0)


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


@pytest.mark.parametrize("seconds", [3.0, pytest.param(OVERLOAD_SECONDS, marks=pytest.mark.slow)])
@pytest.mark.timeout(7200)
def test_ten_times_what_it_can_take_is_answered_or_told_to_come_back(seconds):
    slots, waiting = 4, 4
    counts = {"done": 0, "busy": 0, "error": 0}
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

    async def overload(port: int) -> None:
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as clients:
            clients.create_task(watch(port, until))
            while time.monotonic() < until:
                clients.create_task(client(port))
                await asyncio.sleep(TOKENS * SECONDS_PER_STEP / slots / 10)

    with serving_apart(slots=slots, max_waiting=waiting) as server:
        asyncio.run(overload(server.port))
        wait_until(lambda: server.is_idle)
    healths.sort()
    p99 = healths[int(0.99 * len(healths))]
    middle = statistics.median(healths)
    sys.stdout.write(f"{counts}, /health p50 {1e3 * middle:.1f} p99 {1e3 * p99:.1f} ms\n")
    assert counts["done"] > 0
    assert counts["busy"] > 0
    assert counts["error"] == 0
    if seconds > 60:  # of fewer, one stall of the machine would decide
        assert p99 < 0.1
