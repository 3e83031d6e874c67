"""An HTTP/1.1 proxy that breaks chosen requests on their way to a real S3 server, or the answers.

It runs in a thread of the test's own process: `arm` says which requests are hit and how (see
fault_kinds.py), `requests` counts them, `fired` tells what was done. Whole messages are held in
memory. The Host header goes through as it came, so a signature made for the proxy's address stays
valid. A fault that cannot apply, like flipping a bit of an empty body, does not fire.
"""

import asyncio
import contextlib
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from tests.support.reliability.fault_kinds import KINDS, Exchange, Outcome, reset
from tests.support.reliability.http_messages import Message, exchange, read_body, read_head

_PIECES = 20  # of an answer that drips
_LONGEST_WAIT = 6  # requests until a replayed one arrives
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Breaks some of the requests that it matches, counted from 1 since the proxy was armed."""

    kind: str
    nth: int = 1
    count: int = 1  # how many in a row, from the nth on
    method: str = ".*"  # a regular expression over the whole method
    target: str = ""  # another one, anywhere in path and query

    def matches(self, request: Message) -> bool:
        """Whether it counts the request."""
        is_method = re.fullmatch(self.method, request.method)
        return bool(is_method and re.search(self.target, request.target))


@dataclass(frozen=True, kw_only=True)
class Storm:
    """Breaks any request with a probability, by a random kind."""

    rate: float
    kinds: tuple[str, ...] = tuple(KINDS)


@dataclass(frozen=True, kw_only=True)
class Fired:
    """What was done to a request."""

    request: int  # its number since the proxy was armed, from 1
    kind: str
    method: str
    target: str
    status: int | None  # what the client was told; None when it got no whole answer


CALM = Storm(rate=0.0)


class FaultProxy:
    """A proxy in front of the server at `upstream` (host, port); a context manager.

    `slow` is how long a dripping answer takes, in seconds.
    """

    def __init__(self, upstream: tuple[str, int], *, slow: float = 0.3) -> None:
        self.requests = 0
        self.methods: Counter[str] = Counter()  # of these requests
        self.fired: list[Fired] = []
        self._upstream, self._slow = upstream, slow
        self._faults: tuple[Fault, ...] = ()
        self._storm, self._seed = CALM, 0
        self._counts: list[int] = []  # of matching requests, by fault
        self._answers: dict[str, list[Message]] = {}  # by question
        self._replays: list[tuple[int, Message]] = []  # with the number of the request they precede
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy")
        self._port = 0

    @property
    def endpoint(self) -> str:
        """Where the proxy listens."""
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self._thread.start()
        start = asyncio.start_server(self._on_connection, "127.0.0.1", 0, limit=1 << 20)
        self._server = self._call(start)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def arm(self, *faults: Fault, storm: Storm = CALM, seed: int = 0) -> None:
        """Count anew, with these faults. Open connections and waiting replays are dropped."""
        unknown = {fault.kind for fault in faults}.union(storm.kinds) - KINDS.keys()
        assert not unknown, unknown

        async def change() -> None:
            await self._disconnect()
            self.requests, self.methods, self.fired = 0, Counter(), []
            self._faults, self._storm, self._seed = faults, storm, seed
            self._counts = [0] * len(faults)
            self._answers, self._replays = {}, []

        self._call(change())

    def settle(self) -> int:
        """Have the requests that wait to be replayed reach the server; how many."""

        async def send() -> int:
            waiting, self._replays = self._replays, []
            for _, request in waiting:
                await self._forward(request)
            return len(waiting)

        return self._call(send())

    def write_log(self, path: Path) -> None:
        """What fired, as JSON lines."""
        lines = [json.dumps(asdict(fired)) + "\n" for fired in self.fired]
        path.write_text("".join(lines), encoding="utf-8")

    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _stop(self) -> None:
        self._server.close()
        await self._disconnect()

    async def _disconnect(self) -> None:
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # either side left
                while (head := await read_head(reader)) is not None:
                    outcome = await self._answer(head, reader, writer)
                    if outcome.is_silent:
                        await reader.read()  # until the client gives up
                    if outcome.answer is None:
                        break
                    await self._send(outcome.answer, writer, pieces=_PIECES * outcome.drips or 1)
        finally:
            writer.close()

    async def _answer(
        self, head: Message, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Outcome:
        self.requests += 1
        self.methods[head.method] += 1
        number = self.requests
        kind = self._choose(number, head)
        if kind != "reset_before":
            if head.header("expect"):
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = await read_body(head, reader)
        await self._replay(number)
        answers = self._answers.setdefault(_question(head), [])
        if kind is None:
            answer = await self._forward(head)
            answers.append(answer)
            return Outcome(answer=answer)
        chance = random.Random(f"{self._seed} {number}")
        outcome = await KINDS[kind](
            Exchange(
                request=head,
                writer=writer,
                chance=chance,
                earlier=answers,
                forward=self._forward,
                forward_half=self._forward_half,
                forward_later=lambda request: self._replays.append(
                    (number + chance.randint(1, _LONGEST_WAIT), request)
                ),
            )
        )
        if outcome.fired:
            self._note(number, kind, head, outcome.answer)
        return outcome

    async def _send(self, answer: Message, writer: asyncio.StreamWriter, *, pieces: int) -> None:
        data = answer.encode()
        size = -(-len(data) // pieces)
        for start in range(0, len(data), size):
            if start:
                await asyncio.sleep(self._slow / pieces)
            writer.write(data[start : start + size])
            await writer.drain()

    def _choose(self, number: int, request: Message) -> str | None:
        """The kind of the first fault that hits the request; every fault that matches counts it."""
        chosen = None
        for place, fault in enumerate(self._faults):
            if fault.matches(request):
                self._counts[place] += 1
                if fault.nth <= self._counts[place] < fault.nth + fault.count:
                    chosen = chosen or fault.kind
        chance = random.Random(f"{self._seed} storm {number}")
        if chosen is None and chance.random() < self._storm.rate:
            return chance.choice(self._storm.kinds)
        return chosen

    def _note(self, number: int, kind: str, request: Message, answer: Message | None) -> None:
        self.fired.append(
            Fired(
                request=number,
                kind=kind,
                method=request.method,
                target=request.target,
                status=None if answer is None else answer.status,
            )
        )

    async def _replay(self, number: int) -> None:
        due = [request for at, request in self._replays if at <= number]
        self._replays = [(at, request) for at, request in self._replays if at > number]
        for request in due:
            await self._forward(request)

    async def _forward(self, request: Message) -> Message:
        return await exchange(self._upstream, request)

    async def _forward_half(self, request: Message) -> None:
        data = request.encode()
        _, writer = await asyncio.open_connection(*self._upstream)
        writer.write(data[: len(data) // 2])
        await writer.drain()
        await asyncio.sleep(0.01)  # until it has left: a reset overtakes what has not
        reset(writer)


def _question(request: Message) -> str:
    return f"{request.method} {request.target} {request.header('range')}"
