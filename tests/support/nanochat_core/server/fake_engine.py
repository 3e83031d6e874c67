"""An engine without a model, for what must be known of the server and not of an answer.

It does what the last message says: `echo X` writes X, `long` writes until it may not, `hold FILE`
writes eight letters and keeps its slot until FILE exists or it is cancelled, `call` asks the
calculator, `die` ends the process, `fail` fails, `token N ...` writes those ids, `salt` writes
the salt of its pages.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from nanochat_core.engine.requests import EndEvent, Event, LogProbs, Request, TokenEvent
from nanochat_core.errors import DataError, ModelError
from nanochat_core.server.workers.ipc import ModelFacts, Spec

# Ids of byte_tokenizer.py's, whose import would take longer than all else that a process does here.
(USER_START, ASSISTANT_END) = (257, 260)
(PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END) = range(261, 265)
CONTEXT = 4096
SECONDS_PER_STEP = 0.002


class Ticket:
    """A request under way."""

    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


def _events(
    request: Request, sample: int, answer: list[int], ticket: Ticket
) -> Iterator[Event | None]:
    """Yield an answer's events; None holds its slot for a step."""
    text, top = _last_message(request), request.num_log_probs
    held = Path(text.removeprefix("hold ")) if text.startswith("hold") else None
    most = min(request.max_tokens or CONTEXT, CONTEXT - len(request.prompt))
    for at, token in enumerate(answer):
        if ticket.is_cancelled:
            break
        if token < 0:
            yield EndEvent(sample=sample, reason="failed", error="it was asked to")
            return
        if at >= most and token != ASSISTANT_END:
            yield EndEvent(sample=sample, reason="length")
            return
        log_probs = None
        if top is not None:
            log_probs = LogProbs(-0.5, tuple((token + i, -0.5 - i) for i in range(top)))
        yield TokenEvent(sample=sample, token=token, sampled=True, log_probs=log_probs)
    while held is not None and not held.exists() and not ticket.is_cancelled:
        yield None
    yield EndEvent(sample=sample, reason="cancelled" if ticket.is_cancelled else "stop")


class FakeEngine:
    """Writes a token of as many answers as there are slots, and sleeps."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._answers: list[tuple[Ticket, Request, Iterator[Event | None]]] = []
        self._lock = threading.Lock()

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request: Request) -> Ticket:
        if b"refuse" in bytes(token for token in request.prompt if token < 256):
            raise DataError("this engine does not like it")
        ticket, answer = Ticket(), self._answer(request)
        samples = range(request.num_samples)
        with self._lock:
            self._answers += [
                (ticket, request, _events(request, i, answer, ticket)) for i in samples
            ]
        return ticket

    def _answer(self, request: Request) -> list[int]:
        return _answer_to(request)

    def _run(self) -> None:
        while True:
            time.sleep(SECONDS_PER_STEP)
            with self._lock:
                answers = list(self._answers)
            slots = self._num_slots
            for answer in answers:
                ticket, request, events = answer
                if slots <= 0 and not ticket.is_cancelled:
                    continue
                slots -= 1
                event = next(events)
                if isinstance(event, EndEvent):
                    with self._lock:
                        self._answers.remove(answer)
                if event is not None:
                    request.sink(event)


class LeakyEngine(FakeEngine):
    """Answers one request in twenty with the answer to the one before: a control for tests."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._count = 0
        self._before: list[int] = []

    def _answer(self, request: Request) -> list[int]:
        self._count += 1
        before, self._before = self._before, _answer_to(request)
        return before if self._count % 20 == 0 else self._before


class BriefEngine(FakeEngine):
    """Ends its process as soon as the process is ready."""

    def start(self) -> None:
        """End the process when its sender runs: it has reported by then that it is ready."""

        def end() -> None:
            while threading.active_count() < 4:
                time.sleep(SECONDS_PER_STEP)
            os._exit(9)

        threading.Thread(target=end, daemon=True).start()


def open_leaky(spec: Spec) -> tuple[FakeEngine, ModelFacts]:
    """Open an engine with a fault that a test must notice."""
    _, facts = open_fake(spec)
    return LeakyEngine(spec.num_slots), facts


def open_fake(spec: Spec) -> tuple[FakeEngine, ModelFacts]:
    if spec.directory.endswith("broken"):
        raise ModelError("this model is broken", hint="mend it")
    if spec.directory.endswith("never"):
        time.sleep(600)
    if spec.directory.endswith("crash"):
        os._exit(9)
    if spec.directory.endswith("segfault"):
        signal.raise_signal(signal.SIGSEGV)
    facts = ModelFacts(
        parameters=12345,
        sequence_len=CONTEXT,
        num_slots=spec.num_slots,
        precision="fp32",
        runner="fake",
        choice="fake in fp32",
    )
    if spec.directory.endswith("brief"):
        return BriefEngine(spec.num_slots), facts
    return FakeEngine(spec.num_slots), facts


def _last_message(request: Request) -> str:
    prompt = list(request.prompt)
    is_chat = USER_START in prompt
    last = prompt[len(prompt) - prompt[::-1].index(USER_START) :] if is_chat else prompt[1:]
    return bytes(token for token in last if token < 256).decode("utf-8", "replace")


def _answer_to(request: Request) -> list[int]:
    text = _last_message(request)
    if text == "die":
        os._exit(9)
    if text == "fail":
        return [*b"half", -1]
    if text.startswith("token "):
        return [*map(int, text.split()[1:]), ASSISTANT_END]
    if text == "call":
        call = [PYTHON_START, *b"12*3", PYTHON_END]
        result = [OUTPUT_START, *b"36", OUTPUT_END]
        return [*b"it is ", *call, *result, *b"36", ASSISTANT_END]
    if text == "salt":
        return [*str(request.cache_salt).encode(), ASSISTANT_END]
    if text.startswith("hold"):
        return list(b"abcdefgh")
    if text.startswith("long"):
        return list(b"abcdefgh" * 1024)
    return [*text.removeprefix("echo ").encode(), ASSISTANT_END]
