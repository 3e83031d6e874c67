"""One answer at a time, on a thread of its own, streamed to whoever asked.

The model never runs inside the event loop: health checks and refusals stay quick while it writes.
Whoever stops listening frees the model at the next token. A bounded number of requests may wait.
"""

import asyncio
import codecs
import contextlib
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from nanochat_core.engine.engine import Engine


class Busy(Exception):
    """As many requests wait as may."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What to continue, and how."""

    prompt: list[int]
    temperature: float
    top_k: int
    max_tokens: int
    seed: int


class Generation:
    """The model's queue: one request runs, at most `max_waiting` wait."""

    def __init__(self, engine: Engine, *, max_waiting: int) -> None:
        self._engine = engine
        self._max_waiting = max_waiting
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="generation")
        self._pending = 0

    @property
    def running(self) -> int:
        """Answers being written: 0 or 1."""
        return min(self._pending, 1)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return max(self._pending - 1, 0)

    def stream(self, ask: Ask) -> AsyncIterator[str]:
        """The answer's text in pieces of whole characters, as it is written.

        Dropping or closing the iterator, even one never begun, stops the writing. Raises Busy. Call
        it from the event loop that will iterate.
        """
        if self._pending > self._max_waiting:
            raise Busy
        self._pending += 1
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()
        cancelled = threading.Event()

        def put(piece: str | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        written = loop.run_in_executor(self._thread, self._write, ask, cancelled, put)
        written.add_done_callback(self._release)
        iterator = _read(pieces, written, cancelled)
        weakref.finalize(iterator, cancelled.set)
        return iterator

    def _release(self, written: asyncio.Future[None]) -> None:
        self._pending -= 1
        if not written.cancelled():
            written.exception()  # `_read` raises it where somebody still reads

    def _write(
        self, ask: Ask, cancelled: threading.Event, put: Callable[[str | None], None]
    ) -> None:
        try:
            if not cancelled.is_set():
                self._write_pieces(ask, cancelled, put)
        finally:
            put(None)

    def _write_pieces(
        self, ask: Ask, cancelled: threading.Event, put: Callable[[str | None], None]
    ) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for [token], _ in self._engine.generate(
            ask.prompt,
            max_tokens=ask.max_tokens,
            temperature=ask.temperature,
            top_k=ask.top_k,
            seed=ask.seed,
        ):
            if cancelled.is_set():
                return
            if token not in self._engine.ends:
                _put_text(decoder.decode(self._engine.tokenizer.decode_bytes([token])), put)
        _put_text(decoder.decode(b"", final=True), put)


async def _read(
    pieces: "asyncio.Queue[str | None]", written: "asyncio.Future[None]", cancelled: threading.Event
) -> AsyncIterator[str]:
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        await written  # raises what the writing raised
    finally:
        cancelled.set()


def _put_text(text: str, put: Callable[[str | None], None]) -> None:
    if text:
        put(text)
