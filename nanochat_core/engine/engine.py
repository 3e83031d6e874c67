"""Generates answers of a model, many prompts and samples at a time: token ids in, token ids out.

All requests go through one scheduler (see `scheduler`). Before `start`, a caller that waits for
answers runs its steps on its own thread; after it, the engine's thread does.

Random numbers depend on (seed, sample index, position) only, see `sampling`: a request draws the
same ones alone and in a batch. Whether its logits are the same too depends on the runner: see
docs/concepts/engine.md.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from nanochat_core.engine.answer import Completion, end_tokens
from nanochat_core.engine.requests import ENGINE_FAILED, EndEvent, Event, Request, SamplingParams
from nanochat_core.engine.runners.choose import Choice, open_runner
from nanochat_core.engine.scheduler import Scheduler
from nanochat_core.engine.sequences import RequestHandle
from nanochat_core.engine.tools.calls import ToolTokens
from nanochat_core.model.gpt import GPT
from nanochat_core.runtime.hardware.device import use_device
from nanochat_core.runtime.hardware.oom import answers_oom_explained
from nanochat_core.runtime.heartbeat import HEARTBEAT
from nanochat_core.tokenizer.bpe import Tokenizer

LISTEN_SECONDS = 1.0  # longest sleep of the engine's thread, and of callers that wait for it
SLICE_SECONDS = 0.01  # of a decode call while the engine's thread runs, about: new requests wait

_T = TypeVar("_T")


class Engine:
    """Answers of `model`. The tokenizer is needed for stop tokens and for tool calls.

    The runner is opened, and takes the weights over, when it is first needed.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        *,
        precision: str = "model",
        num_slots: int = 128,
        context: int | None = None,
        memory: int | None = None,
        runner: str | None = None,
        on_choice: Callable[[Choice], None] | None = None,
    ) -> None:
        """Set the engine up. `precision`, `memory`, `runner`, `on_choice`: see `open_runner`.

        `num_slots`: answers that are written at a time.
        `context`: tokens that prompt and answer may hold, the model's sequence_len at most.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.ends = end_tokens(tokenizer)
        self._open_runner = partial(
            open_runner,
            precision=precision,
            num_slots=num_slots,
            max_len=context,
            memory=memory,
            runner=runner,
            on_choice=on_choice,
        )
        longest = model.config.sequence_len
        self._context = longest if context is None else min(context, longest)
        self._opening = threading.Lock()
        self._scheduler: Scheduler | None = None
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._failure: BaseException | None = None  # what ended the engine's thread

    # ---- for a server: many threads submit, one generates

    def start(self) -> None:
        """Start the engine's thread, which runs all steps from then on."""
        assert self._thread is None, "the engine was started before"
        self.scheduler.slice_for(SLICE_SECONDS)
        self._stopped.clear()
        self._failure = None
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the engine's thread; requests in flight fail."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopped.set()
            self.scheduler.wake()
            thread.join()
            self.scheduler.slice_for(None)
            # After `join`: no step may run while its sequences are ended.
            self.scheduler.fail_all("the engine was stopped")
            self._failure = None

    def submit(self, request: Request) -> RequestHandle:
        """Take a request, see `Scheduler.submit`. Raises RuntimeError if the engine's thread has
        failed."""
        self._check_thread()
        handle = self.scheduler.submit(request)
        # Checked again: the thread may have failed in between, and then no step ends this request.
        # One submitted before the failure has been ended by `_serve`.
        self._check_thread()
        return handle

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of all requests; opened, with the runner, on first use."""
        # Locked: the first requests of two threads must not open two runners.
        with self._opening:
            if self._scheduler is None:
                tools = ToolTokens.of(self.tokenizer)
                stop_tokens = self.ends | {tools.python_end}
                runner = self._open_runner(self.model, stop_tokens=stop_tokens)
                self._scheduler = Scheduler(
                    runner,
                    tools,
                    ends=self.ends,
                    context=self._context,
                )
            return self._scheduler

    def refresh(self) -> None:
        """Load the model's current weights into the runner, and drop pages made with older ones."""
        with self._opening:
            scheduler = self._scheduler
        if scheduler is not None:
            scheduler.refresh()

    # ---- for callers that wait for answers

    def generate(
        self,
        tokens: Sequence[int],
        num_samples: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 42,
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield a (token_column, token_masks) per step: the next token of each sample.

        Mask 1: sampled by the model, 0: forced by a tool. A sample's last token is the one that
        ended it (`ends`); while others continue, its column repeats that token with mask 0. It
        stops when all have ended, after `max_tokens` columns, or when sequence_len is full. Raises
        DataError if the prompt is empty or leaves no room.
        """
        events: SimpleQueue[Event] = SimpleQueue()
        request = Request(
            prompt=tokens,
            sink=events.put,
            num_samples=num_samples,
            max_tokens=max_tokens,
            params=SamplingParams(temperature=temperature, top_k=top_k),
            seed=seed,
        )
        # Forced tokens come all at once: a sample that is ahead of the others waits here.
        ahead: list[deque[tuple[int, int]]] = [deque() for _ in range(num_samples)]
        last = [-1] * num_samples
        going = set(range(num_samples))
        handle = self.submit(request)
        try:
            while True:
                while any(not ahead[i] for i in going):
                    event = self._next(events)
                    if isinstance(event, EndEvent):
                        self._check_end(event)
                        going.remove(event.sample)
                    else:
                        ahead[event.sample].append((event.token, int(event.sampled)))
                if not any(ahead):
                    return
                taken = [row.popleft() if row else (last[i], 0) for i, row in enumerate(ahead)]
                last = [token for token, _ in taken]
                yield list(last), [mask for _, mask in taken]
        finally:
            # The caller left the loop early. `drain_inbox` frees the slots at once: without an
            # engine thread there may be no next step.
            if going:
                handle.cancel()
                self.scheduler.drain_inbox()

    def generate_batch(
        self, tokens: Sequence[int], num_samples: int = 1, **settings: Any
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return (results, masks) of each sample: prompt and answer, without the ending token.

        `settings` are those of `generate`. The mask is 0 on the prompt and on forced tokens.
        """
        results = [list(tokens) for _ in range(num_samples)]
        masks = [[0] * len(tokens) for _ in range(num_samples)]
        ended = [False] * num_samples
        for column, column_mask in self.generate(tokens, num_samples, **settings):
            for i, (token, mask) in enumerate(zip(column, column_mask, strict=True)):
                ended[i] = ended[i] or token in self.ends
                if not ended[i]:
                    results[i].append(token)
                    masks[i].append(mask)
        return results, masks

    @answers_oom_explained()
    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_samples: int,
        max_tokens: int,
        temperature: float,
        top_k: int | None,
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        """Return `num_samples` answers to each prompt, in the order of `prompts`; a seed each.

        All are in flight together. Pages cached by earlier calls are not used, so that the same
        call gives the same answers whatever came before it. Raises DataError if a prompt is empty
        or leaves no room, StageError if memory runs out.
        """
        assert len(seeds) == len(prompts), f"{len(seeds)} seeds for {len(prompts)} prompts"
        for prompt in prompts:  # all before the first is submitted: a refusal leaves none behind
            self.scheduler.limit_for(prompt, max_tokens)
        if self._thread is None:
            self.scheduler.forget()
        done: SimpleQueue[EndEvent] = SimpleQueue()
        handles: list[RequestHandle] = []

        def sink(event: Event) -> None:
            if isinstance(event, EndEvent):
                done.put(event)

        try:
            for prompt, seed in zip(prompts, seeds, strict=True):
                request = Request(
                    prompt=prompt,
                    sink=sink,
                    num_samples=num_samples,
                    max_tokens=max_tokens,
                    params=SamplingParams(temperature=temperature, top_k=top_k),
                    seed=seed,
                )
                handles.append(self.submit(request))
            for _ in range(num_samples * len(prompts)):
                self._check_end(self._next(done))
        except BaseException:
            for handle in handles:
                handle.cancel()
            self.scheduler.drain_inbox()
            raise
        return [[seq.answer.completion() for seq in handle.seqs] for handle in handles]

    def _next(self, queue: "SimpleQueue[_T]") -> _T:
        """Return the next item of a queue that a sink fills; without an engine thread, run steps
        until there is one."""
        while True:
            try:
                return queue.get_nowait()
            except Empty:
                self._check_thread()
                if self._thread is None:
                    self._work()
                    continue
            # With a timeout, so that a failure of the engine's thread is noticed.
            try:
                return queue.get(timeout=LISTEN_SECONDS)
            except Empty:
                continue

    def _work(self) -> bool:
        try:
            has_more = self.scheduler.step()
        except BaseException as error:
            # The step stopped midway, so the scheduler's state is not to be trusted: end all.
            self.scheduler.fail_all(ENGINE_FAILED, error if isinstance(error, Exception) else None)
            raise
        HEARTBEAT.beat("answering")
        return has_more

    def _serve(self) -> None:
        try:
            use_device(self.model.lm_head.weight.device)
            while not self._stopped.is_set():
                if not self._work():
                    self.scheduler.wait(LISTEN_SECONDS)
        except BaseException as error:
            self._failure = error
            # `_failure` is set first: a request that `submit` lets in before that is ended here.
            self.scheduler.fail_all(ENGINE_FAILED)
            raise

    def _check_thread(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the engine's thread has failed") from self._failure

    def _check_end(self, event: EndEvent) -> None:
        """Raise the error of an answer that failed or was cancelled."""
        if event.reason == "failed":
            raise event.cause or RuntimeError(event.error)
        if event.reason == "cancelled":
            raise RuntimeError("the request was cancelled by another caller")
