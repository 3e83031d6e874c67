"""A scheduler on a fake runner, and what was asked of it."""

import random
from dataclasses import dataclass, field
from typing import Any

from nanochat_core.engine.answer import Answer, Completion, end_tokens
from nanochat_core.engine.engine import Engine
from nanochat_core.engine.requests import EndEvent, Event, Request, TokenEvent
from nanochat_core.engine.runner import PageGroup
from nanochat_core.engine.sampling import row_key
from nanochat_core.engine.scheduler import Scheduler
from nanochat_core.engine.sequences import RequestHandle
from nanochat_core.engine.tools.calls import ToolTokens
from tests.support.nanochat_core.engine.fake_runner import (
    FakeRunner,
    Place,
    Speaker,
    mix,
    read_token,
)
from tests.support.nanochat_core.server.byte_tokenizer import TOKENIZER

TOOLS = ToolTokens.of(TOKENIZER)
ENDS = end_tokens(TOKENIZER)
CONTEXT = 64
WINDOWS = (6, 64)


@dataclass
class Case:
    windows: tuple[int, ...] = WINDOWS
    num_pages: tuple[int, ...] | int = 100
    num_slots: int = 4
    page_size: int = 4
    is_asynchronous: bool = False
    ends: float = 0.02
    calls: float = 0.02
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.speaker = Speaker(TOKENIZER, ends=self.ends, calls=self.calls)
        counts = self.num_pages
        counts = [counts] * len(self.windows) if isinstance(counts, int) else counts
        self.runner = FakeRunner(
            self.speaker,
            tuple(
                PageGroup(window=window, layers=(i,), num_pages=count)
                for i, (window, count) in enumerate(zip(self.windows, counts, strict=True))
            ),
            page_size=self.page_size,
            num_slots=self.num_slots,
            stop_tokens=ENDS | {TOOLS.python_end},
            is_asynchronous=self.is_asynchronous,
        )
        self.scheduler = Scheduler(
            self.runner,
            TOOLS,
            ends=ENDS,
            context=CONTEXT,
            **{"prefill_tokens": 16, **self.settings},
        )

    def ask(self, prompt: list[int], **changes: Any) -> "Asked":
        return ask(self.scheduler, prompt, **changes)

    def work(self, most: int = 100_000) -> None:
        for _ in range(most):
            if not self.scheduler.step():
                return
        raise AssertionError("it does not end")

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.scheduler.step()

    def finish(self, *asked: "Asked") -> None:
        """Work to the end: these answers are the reference's, and nothing is left."""
        self.work()
        for one in asked:
            self.check(one)
        self.check_empty()

    def check(self, asked: "Asked") -> None:
        request = asked.handle.request
        for sample in range(request.num_samples):
            assert asked.completion(sample) == self.expected(request, sample)

    def expected(self, request: Request, sample: int) -> Completion:
        """Return the answer of a sample: one token after another, nothing shared."""
        memory, key = dict[Place, int](), row_key(request.seed, sample)
        limit = self.scheduler.limit_for(request.prompt, request.max_tokens)
        answer, value, read = Answer(TOOLS, ends=ENDS, limit=limit), 0, 0
        while not answer.is_over:
            tokens = [*request.prompt, *answer.ids]
            for position in range(read, len(tokens)):
                pair = tokens[position], tokens[position - 1] if position else -1
                value = read_token(memory, lambda *at: at, self.windows, position, pair)
            read = len(tokens)
            chosen = mix(value, key, read, self.runner.salt)
            answer.take(self.speaker.say(chosen, tokens[-1]))
        return answer.completion()

    def check_empty(self) -> None:
        """Assert that no sequence has a slot or a page."""
        assert not self.scheduler.slots.running
        assert not self.scheduler.slots.counts.in_flight
        assert not pages_used(self.scheduler)
        assert sorted(self.scheduler.slots.free) == list(range(self.num_slots))
        assert not any(table for tables in self.runner.tables for table in tables)


def pages_used(scheduler: Scheduler) -> int:
    """Return the pages that a sequence or a shared prefix holds."""
    return sum(group.num_pages - group.available for group in scheduler.slots.groups)


@dataclass
class Asked:
    events: list[Event] = field(default_factory=list)
    ends: dict[int, EndEvent] = field(default_factory=dict)
    handle: RequestHandle = field(init=False)

    def take(self, event: Event) -> None:
        assert event.sample not in self.ends, "an event after its end"
        self.events.append(event)
        if isinstance(event, EndEvent):
            self.ends[event.sample] = event

    def tokens(self, sample: int = 0) -> list[TokenEvent]:
        found = [event for event in self.events if event.sample == sample]
        return [event for event in found if isinstance(event, TokenEvent)]

    def completion(self, sample: int = 0) -> Completion:
        """Return the events of an answer that was not cut off as `Engine.complete` gives them."""
        events, reason = self.tokens(sample), self.ends[sample].reason
        if reason == "stop":
            assert events.pop().token in ENDS
        assert reason in ("stop", "length")
        return Completion(
            ids=[event.token for event in events],
            mask=[int(event.sampled) for event in events],
            finished=reason == "stop",
        )

    @property
    def is_over(self) -> bool:
        return len(self.ends) == self.handle.request.num_samples


def ask(of: Scheduler | Engine, prompt: list[int], **changes: Any) -> Asked:
    """Submit a request to a scheduler or an engine."""
    asked = Asked()
    asked.handle = of.submit(Request(prompt=prompt, sink=asked.take, **changes))
    return asked


def prompt_of(rng: random.Random) -> list[int]:
    start = [128 + rng.randrange(3)] * rng.choice((0, 3, 8, 17, 30))
    return [*start, *(rng.randrange(100) for _ in range(rng.randint(1, 12)))]
