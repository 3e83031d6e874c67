"""The engine processes of one model: starts them, gives each request to the least loaded, restarts
one that dies. Not thread-safe: everything here belongs to one event loop.
"""

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from nanochat_core.engine.requests import TokenEvent
from nanochat_core.errors import ModelError
from nanochat_core.server.workers.answer_stream import AnswerStream
from nanochat_core.server.workers.ipc import (
    EngineRequest,
    ModelFacts,
    Spec,
    frame,
    read_message,
    unpack_event,
)
from nanochat_core.tokenizer.bpe import Tokenizer

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0  # seconds of backoff before a restart
MAX_VAIN_LIVES = 6  # starts in a row without one answer, after which it is not restarted
STEADY_SECONDS = 60.0  # a process that ran this long resets the backoff
SECONDS_TO_DIE = 5.0
ENGINE_PROCESS = "nanochat_core.server.workers.engine_process"
_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HangTimeouts:
    """Timeouts after which an engine process counts as hung and is killed."""

    load_seconds: float = 1800.0  # from its start until it is ready
    cancel_seconds: float = 60.0  # from a cancellation until it reports the answer's end


class ServiceUnavailable(Exception):
    """No request can be taken now: too many wait, or all engine processes are being restarted."""


class Worker:
    """One engine process, and the requests under way in it."""

    def __init__(self, index: int, spec: Spec, timeouts: HangTimeouts = HangTimeouts()) -> None:
        self.index = index
        self.spec = spec
        self.timeouts = timeouts
        self.facts: ModelFacts | None = None  # None: it is not ready
        self.restarts = 0
        self.busy = 0  # samples that it writes or that wait in it
        self.failure: ModelError | None = None
        self.changed = asyncio.Event()  # ready, or refused
        self.has_given_up = False  # it is not restarted any more; `failure` says why
        self._was_ready = False
        self._has_answered = False  # in this life of its process
        self._status: int | None = None  # of the last process that ended
        self._under_way: dict[int, AnswerStream] = {}  # requests that it has not ended
        self._count = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is no process."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the process, and restart it whenever it ends."""
        self._task = asyncio.create_task(self._keep_running())

    async def stop(self) -> None:
        """End the process; its requests under way fail. After a cancellation, call it again."""
        if self._task is None:
            return
        # Cancelled once, and waited for without passing a cancellation on: a second one would
        # interrupt `_run_once` while it reaps the process.
        if not self._is_stopping:
            self._is_stopping = True
            self._task.cancel()
        await asyncio.wait([self._task])
        with contextlib.suppress(asyncio.CancelledError):
            self._task.result()

    def submit(self, request: EngineRequest) -> AnswerStream:
        """Send a request to the process, which must be ready."""
        assert self._writer is not None, "no process is ready"
        self._count += 1
        number = self._count

        # The request stays in `_under_way`, and counts as busy, until the engine reports its end:
        # its slot is not free before.
        def cancel() -> None:
            if number in self._under_way:
                self._send(["cancel", number])
                seconds = self.timeouts.cancel_seconds
                asyncio.get_running_loop().call_later(seconds, self._check_ended, number)

        stream = AnswerStream(request.num_samples, worker=self.index, on_cancel=cancel)
        self._under_way[number] = stream
        self.busy += request.num_samples
        # Not `asdict`, which copies each token of the prompt by itself.
        fields = {**vars(request), "params": vars(request.params)}
        self._send(["generate", number, fields])
        return stream

    def fail_all(self, why: str) -> None:
        """End every stream with an error."""
        for stream in self._under_way.values():
            stream.close("failed", why)
        self._under_way.clear()
        self.busy = 0

    def _send(self, message: object) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    async def _keep_running(self) -> None:
        pause, vain = FIRST_PAUSE, 0
        while True:
            began = time.monotonic()
            self._has_answered, self._status = False, None
            try:
                await self._run_once()
            except OSError as error:  # no process or sockets to be had: as if it had ended
                self.failure = ModelError(
                    f"the engine process cannot be started: {error}",
                    hint="the system gives no more processes, files or memory",
                )
            finally:
                # Requests under way are lost with the process: their clients can retry.
                self.facts = self._writer = None
                self.fail_all("the engine stopped unexpectedly; try again in a moment")
            hint = "see its output above for the reason"
            # The first start fails because of the model or the machine: report it, do not retry.
            if not self._was_ready:
                how = f"the engine ended at once: {self._how_it_ended()}"
                self.failure = self.failure or ModelError(how, hint=hint)
                self.changed.set()
                return
            # A process that could not be started does not count: the shortage may pass.
            vain = 0 if self._has_answered or self._status is None else vain + 1
            why = self.failure or self._how_it_ended()
            if vain == MAX_VAIN_LIVES:
                self.failure = ModelError(
                    f"the engine process ended {vain} times without one answer: {why}", hint=hint
                )
                self.has_given_up = True
                return
            self.failure = None
            _LOG.error("engine process %d ended: %s; it is started again", self.index, why)
            self.restarts += 1
            steady = time.monotonic() - began > STEADY_SECONDS
            pause = FIRST_PAUSE if steady else min(2 * pause, LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def _run_once(self) -> None:
        """Run the process once, from its start to its end."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undone:
            undone.callback(ours.close)
            # A process group of its own: Ctrl-C must reach the HTTP process alone, which ends this
            # one after the answers under way.
            self._process = subprocess.Popen(
                [sys.executable, "-m", ENGINE_PROCESS, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
            undone.pop_all()  # the process has started: our end of the socket stays open
        seconds = self.timeouts.load_seconds
        loading = asyncio.get_running_loop().call_later(seconds, self._check_loaded)
        try:
            # limit: bytes that are buffered before the engine process has to wait.
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=2**26)
            self._send(dataclasses.asdict(self.spec))
            while (message := await read_message(reader)) is not None:
                self._handle(message)
        finally:
            loading.cancel()
            if self._writer is not None:
                self._writer.close()
            # Shielded: `stop` cancels this task, and the process must be reaped all the same.
            await asyncio.shield(_end(self._process))
            self._status, self._process = self._process.returncode, None

    def _how_it_ended(self) -> str:
        if self._status is None or self._status >= 0:
            return f"exit status {self._status}"
        return f"killed by {signal.Signals(-self._status).name}"

    def _check_loaded(self) -> None:
        if self.facts is None:
            self._kill(f"it was not ready within {self.timeouts.load_seconds:g} seconds")

    def _check_ended(self, number: int) -> None:
        if number in self._under_way:  # else it has ended, or its process has
            seconds = self.timeouts.cancel_seconds
            self._kill(f"it did not end a cancelled answer within {seconds:g} seconds")

    def _kill(self, why: str) -> None:
        """Kill a process that hangs; it is then restarted like one that died."""
        if self._process is not None:
            self.failure = ModelError(f"the engine hangs: {why}", hint="it was killed")
            self._process.kill()

    def _handle(self, message: list[Any]) -> None:
        match message:
            case ["ready", dict(facts)]:
                self.facts = ModelFacts(**facts)
                self._was_ready = True
                self.changed.set()
            case ["refused", str(why), hint]:
                self.failure = ModelError(why, hint=hint)
            case ["events", list(events)]:
                for event in events:
                    self._put(event)

    def _put(self, packed: list[Any]) -> None:
        stream = self._under_way.get(packed[0])
        if stream is None:
            return
        event = unpack_event(packed)
        stream.put(event)
        if not isinstance(event, TokenEvent):
            self._has_answered |= event.reason in ("stop", "length")
            ended = stream.unfinished if event.sample < 0 else 1  # below 0: the request was refused
            stream.unfinished -= ended
            self.busy -= ended
            if not stream.unfinished:
                del self._under_way[packed[0]]
                self._send(["forget", packed[0]])


class Pool:
    """The engine processes of one model, and its tokenizer."""

    def __init__(
        self,
        specs: Sequence[Spec],
        tokenizer: Tokenizer,
        *,
        max_waiting: int,
        timeouts: HangTimeouts = HangTimeouts(),
    ) -> None:
        self.tokenizer = tokenizer
        self.max_waiting = max_waiting  # samples that may wait at each process
        self.workers = [Worker(index, spec, timeouts) for index, spec in enumerate(specs)]
        self.preparing = 0  # requests that will be submitted here
        self._facts: ModelFacts | None = None

    @property
    def facts(self) -> ModelFacts:
        """The model's facts; the pool must have been started."""
        assert self._facts is not None, "the pool was not started"
        return self._facts

    @property
    def failure(self) -> ModelError | None:
        """The reason why no process is restarted any more; None while one is."""
        return self.workers[0].failure if all(w.has_given_up for w in self.workers) else None

    @property
    def is_ready(self) -> bool:
        """True if any process can answer."""
        return any(worker.facts for worker in self.workers)

    @property
    def num_slots(self) -> int:
        """Answers that can be written at the same time."""
        return sum(worker.facts.num_slots for worker in self.workers if worker.facts)

    @property
    def running(self) -> int:
        """Answers that are being written."""
        ready = [worker for worker in self.workers if worker.facts]
        return sum(min(w.busy, w.facts.num_slots) for w in ready if w.facts)

    @property
    def available(self) -> int:
        """Processes that can begin another answer at once."""
        return sum(1 for w in self.workers if w.facts and w.busy < w.facts.num_slots)

    @property
    def waiting(self) -> int:
        """Answers that wait for a slot."""
        return sum(worker.busy for worker in self.workers) - self.running

    @property
    def restarts(self) -> int:
        """Restarts of the processes since the pool was made."""
        return sum(worker.restarts for worker in self.workers)

    async def start(self) -> None:
        """Start the processes and wait until all are ready. Raises ModelError."""
        for worker in self.workers:
            worker.start()
        for worker in self.workers:
            await worker.changed.wait()
            if worker.failure:
                await self.stop()
                raise worker.failure
            self._facts = self._facts or worker.facts

    def submit(self, request: EngineRequest) -> AnswerStream:
        """Send a request to the least busy process. Raises ServiceUnavailable."""
        return self.find_worker(request.num_samples).submit(request)

    def find_worker(self, num_samples: int) -> Worker:
        """Return the least busy process. Raises ServiceUnavailable.

        Routes also call this first, to refuse a request before they tokenise it.
        """
        ready = [worker for worker in self.workers if worker.facts]
        if not ready:
            raise ServiceUnavailable("the model is being loaded")
        worker = min(ready, key=lambda worker: worker.busy)
        assert worker.facts is not None
        # An idle process takes a request of any number of samples: it could never run else.
        most = worker.facts.num_slots + self.max_waiting
        if worker.busy and worker.busy + num_samples > most:
            raise ServiceUnavailable("too many requests are waiting")
        return worker

    def fail_all(self, why: str) -> None:
        """End every stream with an error."""
        for worker in self.workers:
            worker.fail_all(why)

    async def stop(self) -> None:
        """End the processes; requests under way fail."""
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    async def drain(self, *, seconds: float) -> None:
        """Wait until no request is under way, at most `seconds`; then stop."""
        until = time.monotonic() + seconds
        while (self.preparing or self.running or self.waiting) and time.monotonic() < until:
            await asyncio.sleep(0.05)
        await self.stop()


async def _end(process: "subprocess.Popen[bytes]") -> None:
    """Wait for a process whose socket is closed to exit, and kill it after SECONDS_TO_DIE."""
    # Polled: there is no asyncio watcher for it, as it was not started through asyncio.
    until = time.monotonic() + SECONDS_TO_DIE
    while process.poll() is None:
        if time.monotonic() > until:
            process.kill()
        await asyncio.sleep(0.005)
