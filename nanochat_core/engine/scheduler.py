"""Continuous batching: assigns the runner's slots and pages to sequences, step by step.

A step takes new and cancelled requests, gives free slots to waiting sequences, prefills a bounded
number of prompt tokens, and decodes. So a sequence can begin or end at any step, and a long prompt
does not stall the others. If pages run out, sequences wait; if running ones need more, the newest
is preempted: it loses its pages, is prefilled again later and resumes with the same text.

A tool call stops its slot. The result is prefilled like a piece of a prompt, then decoding resumes.
"""

import heapq
import threading
from collections import deque
from collections.abc import Sequence

from nanochat_core.engine.answer import Answer
from nanochat_core.engine.requests import MAX_LOG_PROBS, Request, check_request
from nanochat_core.engine.runner import Runner
from nanochat_core.engine.sequences import Phase, RequestHandle, TokenSequence
from nanochat_core.engine.slots import Slots
from nanochat_core.engine.steps import StepRunner
from nanochat_core.engine.tools.calls import ToolTokens
from nanochat_core.errors import DataError


class Scheduler:
    """A queue of requests and the sequences that run. `submit` and `cancel` may be called from any
    thread; `step` too, one at a time: its caller's thread does the work."""

    def __init__(
        self,
        runner: Runner,
        tools: ToolTokens,
        *,
        ends: frozenset[int],
        context: int,
        prefill_tokens: int | None = None,
        max_steps: int = 8,
    ) -> None:
        """Set an empty scheduler up. `context`: tokens that prompt and answer may hold.

        `prefill_tokens`: the most that are prefilled per step; None: the runner's. A decode call is
        up to `max_steps` steps: new and cancelled requests wait for it to end.
        """
        self.runner = runner
        self.slots = Slots(
            runner,
            context=context,
            prefill_tokens=prefill_tokens or runner.prefill_tokens,
            max_steps=max_steps,
            on_leave=self._note_left,
        )
        self._steps = StepRunner(self.slots, call_end=tools.python_end, max_steps=max_steps)
        self._tools = tools
        self._ends = ends
        self._context = context
        self._waiting: list[tuple[tuple[int, int, int], TokenSequence]] = []  # a heap
        # Shared with other threads. `_changed` guards count and flag and wakes `wait`; the deques
        # are atomic. `_stepping` serialises steps, reentrant because `refresh` calls `forget`.
        self._changed = threading.Condition()
        self._stepping = threading.RLock()
        self._arrived: deque[RequestHandle] = deque()
        self._cancelled: deque[RequestHandle] = deque()
        self._num_requests = 0
        self._is_woken = False

    # ---- for any thread

    def submit(self, request: Request) -> RequestHandle:
        """Queue a request. Its sink is called on the thread that calls `step`.

        Raises DataError if the prompt is empty, too long, not of this model's tokens or more than
        all pages hold, or if a number is out of range.
        """
        check_request(request, most_log_probs=min(MAX_LOG_PROBS, self.runner.vocab_size))
        limit = self.limit_for(request.prompt, request.max_tokens)
        self._check_fits(len(request.prompt) + limit)
        with self._changed:
            handle = RequestHandle(
                request=request,
                prompt=list(request.prompt),
                arrival=self._num_requests,
                limit=limit,
                on_cancel=self._note_cancelled,
            )
            self._num_requests += 1
            self._arrived.append(handle)
            self._changed.notify_all()
        return handle

    def limit_for(self, prompt: Sequence[int], max_tokens: int | None) -> int:
        """Return how many tokens may follow `prompt`. Raises DataError if it is empty, too long or
        not of this model's tokens."""
        if not prompt:
            raise DataError("the prompt is empty", hint="it needs at least <|bos|>")
        if not 0 <= min(prompt) <= max(prompt) < self.runner.vocab_size:
            raise DataError(
                f"the prompt has tokens from {min(prompt)} to {max(prompt)}, "
                f"the model knows those from 0 to {self.runner.vocab_size - 1}",
                hint="encode it with the model's tokenizer",
            )
        room = self._context - len(prompt)
        if room < 1:
            raise DataError(
                f"the prompt is {len(prompt)} tokens long, "
                f"the model reads {self._context} and needs one for the answer",
                hint="make it shorter",
            )
        return room if max_tokens is None else min(max_tokens, room)

    def wait(self, seconds: float) -> None:
        """Sleep until a request comes, one is cancelled or `wake` is called, at most `seconds`."""
        with self._changed:
            if not self._arrived and not self._cancelled and not self._is_woken:
                self._changed.wait(seconds)
            self._is_woken = False

    def wake(self) -> None:
        """End the `wait` under way, or the next one: the steps' thread may be about to call it."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    # ---- for the thread that runs the steps

    def step(self) -> bool:
        """Run one step. Returns whether any work is left."""
        with self._stepping:
            self.drain_inbox()
            self._admit()
            for seq in self._steps.prefill():
                self._share(seq)
            # Again: the other samples of prompts that were prefilled just now can begin.
            self._admit()
            self._steps.sample_first()
            self._steps.decode()
            asked = self._waiting or self._arrived or self._cancelled
            return bool(asked) or not self._steps.is_idle

    def drain_inbox(self) -> None:
        """Take new and cancelled requests, without running a step."""
        with self._stepping:
            # Take the cancellations before the arrivals: every request in this list was submitted
            # before, so the loop below opens it. One cancelled from here on waits for the next
            # step.
            cancelled = [self._cancelled.popleft() for _ in range(len(self._cancelled))]
            while self._arrived:
                self._open(self._arrived.popleft())
            for handle in cancelled:
                if any(seq.phase is not Phase.FINISHED for seq in handle.seqs):
                    self.slots.counts.cancellations += 1
                    self.slots.drop_prefix(handle)
                    for seq in handle.seqs:
                        self.slots.end(seq, "cancelled")
            counts, running = self.slots.counts, self.slots.running
            # Ended sequences leave the heap only at its top. Rebuild it once they are the majority,
            # or cancelled requests would hold memory until all before them have begun.
            if cancelled and len(self._waiting) > 2 * (counts.in_flight - len(running)):
                self._waiting = [row for row in self._waiting if row[1].phase is not Phase.FINISHED]
                heapq.heapify(self._waiting)

    def refresh(self) -> None:
        """Load the model's current weights; sequences in flight are prefilled again with them."""
        with self._stepping:
            # Before the weights change: `forget` reads the steps that still run on the old ones.
            self.forget()
            self.runner.refresh()

    def forget(self) -> None:
        """Preempt all sequences and empty the prefix cache, as if the scheduler were new."""
        with self._stepping:
            self._steps.drain()
            for seq in list(self.slots.running):
                self.slots.preempt(seq)
            self.slots.forget()

    def slice_for(self, seconds: float | None) -> None:
        """Limit a decode call to about so many seconds; None: no limit."""
        with self._stepping:
            self._steps.slice_seconds = seconds

    def fail_all(self, error: str, cause: Exception | None = None) -> None:
        """Fail all requests in flight, after a step that did not finish."""
        with self._stepping:
            self.drain_inbox()
            in_flight = [seq for _, seq in self._waiting] + self.slots.running
            self._waiting.clear()
            self._steps.drop()
            self.slots.reset()
            for handle in {seq.handle.arrival: seq.handle for seq in in_flight}.values():
                for seq in handle.seqs:
                    self.slots.end(seq, "failed", error, cause)
            self.slots.release_all()

    def _note_cancelled(self, handle: RequestHandle) -> None:
        with self._changed:
            self._cancelled.append(handle)
            self._changed.notify_all()

    def _check_fits(self, total: int) -> None:
        if not self.slots.fits(total - 1):  # the last token is never read
            raise DataError(
                f"prompt and answer are up to {total} tokens long, "
                f"more than all pages of the KV cache hold",
                hint="give the engine more memory, or set max_tokens",
            )

    def _open(self, handle: RequestHandle) -> None:
        for index in range(handle.request.num_samples):
            answer = Answer(self._tools, ends=self._ends, limit=handle.limit)
            handle.seqs.append(TokenSequence(handle, index, answer))
        handle.num_to_begin = len(handle.seqs)
        self.slots.counts.in_flight += len(handle.seqs)
        if handle.limit < 1:
            for seq in handle.seqs:
                self.slots.end(seq, "length")
        for seq in handle.seqs:
            self._queue(seq)

    def _queue(self, seq: TokenSequence) -> None:
        if seq.phase is Phase.WAITING:
            heapq.heappush(self._waiting, (seq.order, seq))

    def _admit(self) -> None:
        """Give slots to waiting sequences, in their order."""
        while self._waiting:
            seq = self._waiting[0][1]
            handle = seq.handle
            if seq.phase is Phase.WAITING:
                if seq.is_fresh and handle.first is not None:
                    handle.rest.append(seq)
                elif not self.slots.make_room(seq):
                    # Smaller ones behind it wait too: overtaken at each step, a long prompt would
                    # never find enough pages free.
                    return
                elif seq.is_fresh and handle.prefix is not None:
                    self.slots.fork(seq, handle.prefix)
                    if not handle.num_to_begin:
                        self.slots.drop_prefix(handle)
                else:
                    if seq.is_fresh:
                        handle.first = seq
                    self.slots.begin(seq)
            heapq.heappop(self._waiting)

    def _share(self, seq: TokenSequence) -> None:
        """Let the request's other samples begin, if `sample` has prefilled their prompt."""
        handle = seq.handle
        if handle.first is seq:
            if handle.num_to_begin:
                self.slots.make_prefix(seq)
            self._note_left(seq)

    def _note_left(self, seq: TokenSequence) -> None:
        """Requeue a sequence that lost its slot, and those that waited for it to prefill."""
        self._queue(seq)
        handle = seq.handle
        if handle.first is seq:
            handle.first = None
            for other in handle.rest:
                self._queue(other)
            handle.rest.clear()
