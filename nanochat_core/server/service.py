"""State that the routes share: the served model and its rules, and the streams of answers."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from nanochat_core.engine.requests import EndEvent, Event, TokenEvent
from nanochat_core.server.config import ServerConfig
from nanochat_core.server.metrics import Metrics
from nanochat_core.server.text import AnswerText, MarkerFilter, StopStrings, TextPiece, TextToken
from nanochat_core.server.workers.ipc import EngineRequest
from nanochat_core.server.workers.pool import AnswerStream, Pool

_LOG = logging.getLogger(__name__)
Finish: TypeAlias = Literal["stop", "length", "cancelled", "failed"]


class Service:
    """A running server: its pool of engine processes, its rules and its metrics."""

    def __init__(self, pool: Pool, *, name: str, rules: ServerConfig, metrics: Metrics) -> None:
        self.pool = pool
        self.name = name
        self.rules = rules
        self.metrics = metrics
        self.created = int(time.time())
        self._leaving: dict[asyncio.Task[None], Pool] = {}
        self._restarts = 0  # of pools that have ended

    @property
    def pools(self) -> list[Pool]:
        """The pool that takes requests, and those that are draining."""
        return [self.pool, *self._leaving.values()]

    @property
    def running(self) -> int:
        """Answers that are being written."""
        return sum(pool.running for pool in self.pools)

    @property
    def waiting(self) -> int:
        """Answers that wait for a slot."""
        return sum(pool.waiting for pool in self.pools)

    @property
    def restarts(self) -> int:
        """Restarts of engine processes since the server began."""
        return self._restarts + sum(pool.restarts for pool in self.pools)

    async def settled(self) -> None:
        """Wait until no model is leaving, so that there are never more than two in memory."""
        while self._leaving:
            await asyncio.wait(self._leaving)

    async def swap(self, make_pool: Callable[[], Pool]) -> None:
        """Serve another model. Streams under way end with the model that they began with.

        Waits until the previous model is gone, see `settled`. Raises ModelError, with the old model
        still served, if the new one cannot be loaded.
        """
        await self.settled()
        new = make_pool()
        await new.start()  # while the old pool still answers: no request is refused for a swap
        old, self.pool = self.pool, new
        drained = asyncio.create_task(old.drain(seconds=self.rules.max_seconds))
        self._leaving[drained] = old
        drained.add_done_callback(self._forget)

    def fail_all(self, why: str) -> None:
        """End every stream with an error."""
        for pool in self.pools:
            pool.fail_all(why)

    async def stop(self) -> None:
        """End every engine process."""
        pools = self.pools
        for leaving in tuple(self._leaving):
            leaving.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await asyncio.gather(*(pool.stop() for pool in pools))

    def _forget(self, drained: asyncio.Task[None]) -> None:
        self._restarts += self._leaving.pop(drained).restarts


@dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """A piece of one of a request's answers, or its end."""

    sample: int
    piece: TextPiece | None = None
    tokens: tuple[TextToken, ...] = ()  # whose text it is, where they are wanted
    finish: Finish | None = None
    error: str = ""


@dataclass(kw_only=True)
class _Choice:
    """The state of one answer of a request."""

    sample: int
    text: AnswerText
    stops: StopStrings
    markers: MarkerFilter = field(default_factory=MarkerFilter)
    tokens: list[TextToken] = field(default_factory=list)  # their text is not yet shown
    length: int = 0  # of the text so far, in characters
    shown: int = 0  # of them; the rest may be the beginning of a stop string or a marker
    written: list[str] = field(default_factory=list)  # for the log
    over: bool = False
    counted: bool = False


class GenerationStream:
    """One request's answers while they are written. Its owner must call `close`, also on errors."""

    def __init__(
        self, service: Service, pool: Pool, request: EngineRequest, *, stops: Sequence[str] = ()
    ) -> None:
        """Submit the request. Raises ServiceUnavailable."""
        # First: if it raises, there is nothing to cancel or to count.
        self.stream: AnswerStream = pool.submit(request)
        self.prompt_tokens = len(request.prompt)
        self.completion_tokens = 0
        self.finish: Finish | None = None  # of the first answer
        self._metrics = service.metrics
        self._seconds = service.rules.max_seconds
        self._ping = service.rules.ping_seconds
        self._began = self._last = time.monotonic()
        self._is_late = False
        tokenizer = pool.tokenizer
        self._ends = {tokenizer.bos, tokenizer.special("<|assistant_end|>")}
        self._is_logged = service.rules.log == "contents"
        if self._is_logged:
            _LOG.info("asked: %r", tokenizer.decode(request.prompt))
        self._choices = [
            _Choice(sample=i, text=AnswerText(tokenizer), stops=StopStrings(stops))
            for i in range(request.num_samples)
        ]
        self._metrics.prompt_tokens.inc(len(request.prompt))

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    @property
    def failure_status(self) -> int:
        """HTTP status of its failure: 504 too late, 400 refused by the engine, 500 otherwise."""
        if self._is_late:
            return 504
        return 400 if self.stream.was_refused else 500

    def close(self) -> None:
        """Cancel the answers that have not ended. May be called more than once."""
        for choice in self._choices:
            self._count_end(choice, "cancelled")
        self.stream.cancel()
        if self._is_logged:
            self._is_logged = False
            for choice in self._choices:
                _LOG.info("answered: %r", "".join(choice.written))

    async def events(self) -> AsyncIterator[list[StreamEvent]]:
        """Yield events as they come, and an empty list after `ping_seconds` without any."""
        while not self._is_over:
            left = self._seconds - self.seconds
            # The earlier of the next ping and the request's own limit.
            try:
                async with asyncio.timeout(max(0.0, min(self._ping, left))):
                    events = await self.stream.take()
            except TimeoutError:
                if left > self._ping:
                    yield []
                    continue
                events = self._out_of_time()
            if not events:
                return
            items = [item for event in events for item in self._follow(event)]
            self._count(events)
            if items:
                yield items

    @property
    def _is_over(self) -> bool:
        return all(choice.over for choice in self._choices)

    def _out_of_time(self) -> list[Event]:
        self._is_late = True
        self.stream.cancel()
        error = f"the answer took longer than {self._seconds:g} seconds"
        return [
            EndEvent(sample=choice.sample, reason="failed", error=error)
            for choice in self._choices
            if not choice.over
        ]

    def _follow(self, event: Event) -> list[StreamEvent]:
        choice = self._choices[event.sample]
        if choice.over:
            return []
        if isinstance(event, EndEvent):
            items = self._pieces(choice, choice.text.end())
            return [*items, *self._end(choice, event.reason, event.error)]
        if event.token in self._ends:
            return []
        self.completion_tokens += 1
        if event.log_probs is not None and choice.text.is_text(event.token):
            token = TextToken(id=event.token, log_probs=event.log_probs, offset=choice.length)
            choice.tokens.append(token)
        items = self._pieces(choice, choice.text.take(event.token))
        # The engine knows no stop strings: it writes on until the request is cancelled, which
        # stops all of its answers and so waits for the last.
        if choice.stops.found:
            items += self._end(choice, "stop", "")
            if self._is_over:
                self.stream.cancel()
        return items

    def _pieces(self, choice: _Choice, pieces: Iterable[TextPiece]) -> list[StreamEvent]:
        items = list[StreamEvent]()
        for piece in pieces:
            if piece.kind == "text":
                choice.length += len(piece.text)
                piece = replace(piece, text=choice.stops.take(piece.text))
            items += self._show(choice, choice.markers.take(piece))
        return items

    def _show(self, choice: _Choice, pieces: Iterable[TextPiece]) -> list[StreamEvent]:
        """Return the events of pieces that are no part of a stop string.

        A token goes out with the first character of its text, so none of a stop string's does.
        """
        items = list[StreamEvent]()
        for piece in pieces:
            tokens = ()
            choice.written.append(piece.written)
            if piece.kind == "text":
                choice.shown += len(piece.written)
                tokens = tuple(token for token in choice.tokens if token.offset < choice.shown)
                del choice.tokens[: len(tokens)]  # offsets never fall
            items.append(StreamEvent(sample=choice.sample, piece=piece, tokens=tokens))
        return items

    def _end(self, choice: _Choice, reason: Finish, error: str) -> list[StreamEvent]:
        choice.over = True
        self.finish = self.finish or reason
        self._count_end(choice, reason)
        end = StreamEvent(sample=choice.sample, finish=reason, error=error)
        # Text that was held back cannot become a stop string or a marker any more.
        held = TextPiece(kind="text", text=choice.stops.end())
        return [*self._show(choice, (*choice.markers.take(held), *choice.markers.end())), end]

    def _count_end(self, choice: _Choice, reason: Finish) -> None:
        if not choice.counted:
            choice.counted = True
            self._metrics.ends.labels(reason).inc()

    def _count(self, events: Sequence[Event]) -> None:
        tokens = sum(isinstance(event, TokenEvent) for event in events)
        if not tokens:
            return
        now = time.monotonic()
        # The first tokens since the start; later ones share the time since the last message.
        if self._last == self._began:
            self._metrics.first_token.observe(now - self._began)
        else:
            self._metrics.next_token.observe((now - self._last) / tokens)
        self._last = now
        self._metrics.count_tokens(tokens)


def engine_seed(seed: int | None) -> int:
    """Return the engine's seed for a request's; a random one for None."""
    # Modulo 2**62: never negative, and fits the int64 in which the engine computes.
    return secrets.randbits(62) if seed is None else seed % 2**62
