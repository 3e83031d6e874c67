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
from pathlib import Path

from nanochat_core.engine.requests import EndEvent, LogProbs, Request, TokenEvent
from nanochat_core.errors import DataError, ModelError
from nanochat_core.server.workers.ipc import ModelFacts, Spec

# Ids of byte_tokenizer.py's, whose import would take longer than all else that a process does here.
(USER_START, ASSISTANT_END) = (257, 260)
(PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END) = range(261, 265)
CONTEXT = 4096
SECONDS_PER_STEP = 0.002


class Ticket:
    """A request and how far it is."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.answer = _answer_to(request)
        text = _last_message(request)
        self.holds = Path(text.removeprefix("hold ")) if text.startswith("hold") else None
        self.at = [0] * request.num_samples
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeEngine:
    """Writes a token of as many answers as there are slots, and sleeps."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._tickets: list[Ticket] = []
        self._lock = threading.Lock()

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """Nothing to do."""

    def submit(self, request: Request) -> Ticket:
        if b"refuse" in bytes(token for token in request.prompt if token < 256):
            raise DataError("this engine does not like it")
        ticket = Ticket(request)
        with self._lock:
            self._tickets.append(ticket)
        return ticket

    def _run(self) -> None:
        while True:
            time.sleep(SECONDS_PER_STEP)
            slots = self._num_slots
            with self._lock:
                tickets = list(self._tickets)
            for ticket in tickets:
                slots -= self._step(ticket, slots)
            with self._lock:
                self._tickets = [t for t in self._tickets if any(at >= 0 for at in t.at)]

    def _step(self, ticket: Ticket, slots: int) -> int:
        """Write a token of each sample that has a slot; how many have."""
        request, used = ticket.request, 0
        for sample, at in enumerate(ticket.at):
            if at < 0 or (used == slots and not ticket.is_cancelled):
                continue
            reason = self._end(ticket, at)
            if reason:
                ticket.at[sample] = -1
                error = "it was asked to" if reason == "failed" else ""
                request.sink(EndEvent(sample=sample, reason=reason, error=error))
                continue
            used += 1
            if at == len(ticket.answer):
                continue  # it holds its slot
            ticket.at[sample] += 1
            token = ticket.answer[at]
            log_probs = None
            if request.num_log_probs is not None:
                top = tuple((token + i, -0.5 - i) for i in range(request.num_log_probs))
                log_probs = LogProbs(chosen=-0.5, top=top)
            request.sink(TokenEvent(sample=sample, token=token, sampled=True, log_probs=log_probs))
        return used

    def _end(self, ticket: Ticket, at: int):
        if ticket.is_cancelled:
            return "cancelled"
        if at < len(ticket.answer):
            if ticket.answer[at] < 0:
                return "failed"
            most = ticket.request.max_tokens or CONTEXT
            is_end = ticket.answer[at] == ASSISTANT_END
            full = at >= most or len(ticket.request.prompt) + at >= CONTEXT
            return "length" if full and not is_end else None
        is_held = ticket.holds is not None and not ticket.holds.exists()
        return None if is_held else "stop"


class LeakyEngine(FakeEngine):
    """Answers one request in twenty with the answer to the one before: a control for tests."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._count = 0
        self._before: list[int] = []

    def submit(self, request: Request) -> Ticket:
        ticket = super().submit(request)
        self._count += 1
        before, self._before = self._before, ticket.answer
        if self._count % 20 == 0:
            ticket.answer = before
        return ticket


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
