"""A scheduler on a fake runner, and what was asked of it."""

import random
from dataclasses import dataclass, field
from typing import Any

from nanochat_core.engine.answer import end_tokens
from nanochat_core.engine.requests import EndEvent, Event, Request, TokenEvent
from nanochat_core.engine.scheduler import Scheduler
from nanochat_core.engine.sequences import RequestHandle
from nanochat_core.engine.tools.calls import ToolTokens
from nanochat_core.tokenizer.bpe import Tokenizer
from tests.support.nanochat_core.engine.fake_runner import (
    FakeRunner,
    Speaker,
    pages_of,
    reference_answer,
)

TOKENIZER = Tokenizer({bytes([i]): i for i in range(256)})
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
        self.runner = FakeRunner(
            self.speaker,
            pages_of(self.windows, num_pages=self.num_pages),
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
        asked = Asked()
        asked.handle = self.scheduler.submit(Request(prompt=prompt, sink=asked.take, **changes))
        return asked

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
        limit = self.scheduler.limit_for(request.prompt, request.max_tokens)
        for sample in range(request.num_samples):
            expected, mask, finished = reference_answer(
                self.speaker,
                TOOLS,
                self.windows,
                request.prompt,
                limit=limit,
                ends=ENDS,
                seed=request.seed,
                sample=sample,
                salt=self.runner.salt,
                penalty=request.params.repetition_penalty != 1.0,
            )
            events = asked.tokens(sample)
            if finished:
                assert events.pop().token in ENDS
            assert [event.token for event in events] == expected
            assert [int(event.sampled) for event in events] == mask
            assert asked.ends[sample].reason == ("stop" if finished else "length")

    def check_empty(self) -> None:
        """Nobody has a slot or a page."""
        assert not self.scheduler.slots.running
        assert not self.scheduler.slots.counts.in_flight
        assert not pages_used(self.scheduler)
        assert sorted(self.scheduler.slots.free) == list(range(self.num_slots))


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

    @property
    def is_over(self) -> bool:
        return len(self.ends) == self.handle.request.num_samples


def prompt_of(rng: random.Random, *, longest: int = 50, kinds: int = 3) -> list[int]:
    start = [128 + rng.randrange(kinds)] * rng.choice((0, 3, 8, 17, 30))
    rest = [rng.randrange(100) for _ in range(rng.randint(1, 12))]
    return [*start, *rest][:longest]
