"""One attempt of a node other than 0: it follows one start message of node 0 until either ends.

Node 0's side is flows/build/coordinator.py.
"""

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Callable, Generator
from typing import Any

from flows.artifacts import checkpoints
from flows.build.checkpoint_shards import uploading_shards
from flows.build.code_check import CodeCheck
from flows.build.context import BuildContext
from flows.build.coordinator import meeting_of
from flows.build.executions import append_segment
from flows.build.messages import (
    MISTAKE,
    MessagePrefix,
    NodeStatus,
    StartMessage,
    State,
    find_start,
    find_status,
    publish_status,
)
from flows.build.retry import TransientStageError, is_retryable
from infra.launch.background import run_in_background
from infra.launch.torchrun import JobFailed, StageInterrupted, run_job
from nanochat_core.errors import ArtifactError, NanochatError, StageError, StoreError
from nanochat_core.job import Job

_SECONDS_BETWEEN_QUESTIONS = 2.0
_SECONDS_BETWEEN_LOOKS = 0.2
_TRIES = 3
_UNREACHABLE = (StoreError, ArtifactError)


class FollowerAttempt:
    """This node's part in one attempt that node 0 started."""

    def __init__(
        self, context: BuildContext, place: MessagePrefix, call: StartMessage, *, node: int
    ) -> None:
        self.ending = threading.Event()  # the start message is void, or the run is stopped
        self._context = context
        self._place = place
        self._call = call
        self._node = node
        self._beats = 0
        self._heard = time.monotonic()  # when the store last answered
        self._state: State = "coming"
        self._has_ended = False
        self._who = uuid.uuid4().hex
        self._lock = threading.Lock()  # around every status that is published

    def run(self, prepare: Callable[[], tuple[Job, CodeCheck]]) -> None:
        """Run this node's ranks, unless node 0 gives the attempt up before they start.

        `prepare` makes the job and fetches its inputs. Every error is reported to node 0. Raises
        StageInterrupted if this node was stopped, and the error of the job or of `prepare` if a
        retry cannot fix it; returns after a retryable one, for the next start message.
        """
        with self._being_there():
            try:
                job, check = prepare()
                self._restore(job)
                self._state = "ready"
                self._say("ready")
                endpoint = self._wait_for_endpoint()
                if endpoint is not None:
                    self._run(job, endpoint, check)
            except StageInterrupted:
                if self._context.stop.is_set():
                    self._say("leaving")
                    raise
                self._say("ended")
            except NanochatError as error:
                self._say("ended", text=str(error), cause=_cause_of(error), hint=error.hint)
                if not is_retryable(error):
                    raise
                self._log("message", f"this attempt is over: {error}")
            except Exception as error:  # a bug, or a full disk: a retry would fail in the same way
                name = type(error).__name__
                self._say("ended", text=f"{name}: {error}", cause=name)
                raise
            except BaseException:  # Ctrl-C, a cancelled flow run
                self._say("leaving")
                raise
            else:
                self._say("ended")

    def _restore(self, job: Job) -> None:
        """Fetch the checkpoint that all nodes resume from.

        Raises TransientStageError if the store does not have it any more.
        """
        try:
            checkpoints.restore_step(
                self._context.store,
                job,
                self._call.step,
                commit=self._call.commit,
                log=lambda text: self._log("message", text),
            )
        except ArtifactError as error:  # the next attempt's node 0 uploads it again
            raise TransientStageError(str(error), hint=error.hint) from error

    def _run(self, job: Job, endpoint: StartMessage, check: CodeCheck) -> None:
        processes = endpoint.processes
        meeting = meeting_of(endpoint, self._place, node=self._node)
        # torchrun's static rendezvous numbers ranks by node, so these are known before it starts.
        first = meeting.first_rank(processes)
        ranks = range(first, first + processes)

        def warn(error: NanochatError) -> None:
            self._log("warning", f"checkpoint shard not stored: {error}")

        append_segment(job, processes=processes * endpoint.nodes, nodes=endpoint.nodes)
        with uploading_shards(self._place.store, job, ranks, epoch=endpoint.epoch, on_error=warn):
            run_job(
                job,
                processes=processes,
                on_event=self._report_event,
                stop=self.ending,
                check=check,
                root=self._context.root,
                meeting=meeting,
            )

    def _wait_for_endpoint(self) -> StartMessage | None:
        """Return the start message with its endpoint. None if it is void or this attempt ends."""
        while not self.ending.is_set():
            with contextlib.suppress(*_UNREACHABLE):
                call, _ = find_start(self._place, ttl=self._context.terms.ttl)
                if call is not None and call.epoch != self._call.epoch:
                    return None
                if call is not None and call.endpoint is not None:
                    self._check_alone()
                    return call
            self.ending.wait(self._context.terms.look)
        if self._context.stop.is_set():
            raise StageInterrupted(f"{self._place.ref.name}: the run is being stopped")
        return None

    def _check_alone(self) -> None:
        """Raise StageError if another machine has the same node number.

        Both write the same record, so the one that wrote last finds itself and continues.
        """
        found = find_status(self._place, self._node, epoch=self._call.epoch)
        if found is not None and found[0].who != self._who:
            raise StageError(
                f"node {self._node} is on host {found[0].host} too",
                hint="give each machine a number of its own, from 0 on",
            )

    @contextlib.contextmanager
    def _being_there(self) -> Generator[None]:
        """Publish heartbeats and watch the start message while the block runs."""
        self._say(self._state)
        with run_in_background(self._beat, self._watch, self._look_at_clock):
            yield

    def _beat(self, over: threading.Event) -> None:
        while not over.wait(self._context.terms.beat):
            self._say(self._state)

    def _watch(self, over: threading.Event) -> None:
        pause = min(self._context.terms.beat, _SECONDS_BETWEEN_QUESTIONS)
        while not over.wait(pause):
            try:
                call, _ = find_start(self._place, ttl=self._context.terms.ttl)
            except _UNREACHABLE:
                continue
            self._heard = time.monotonic()
            if call is None or call.epoch != self._call.epoch:
                self.ending.set()

    def _look_at_clock(self, over: threading.Event) -> None:
        """End the attempt if the run is stopped or the store was not reached for half a lease.

        Sends no requests: one that gets no response can hang for minutes. After half a lease node 0
        counts this node as lost and has ended its own ranks.
        """
        while not over.wait(_SECONDS_BETWEEN_LOOKS):
            is_cut_off = time.monotonic() - self._heard > self._context.terms.ttl / 2
            if is_cut_off or self._context.stop.is_set():
                self.ending.set()

    def _say(
        self, state: State, *, text: str = "", cause: str = "", hint: str | None = None
    ) -> None:
        """Publish this node's status. Gives up after three tries: node 0 notices the silence."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = state in ("ended", "leaving")
            # A heartbeat may have waited for the lock with an old state ("coming"): publish the
            # current one, so that "ready" is never taken back.
            if not self._has_ended:
                state = self._state
            self._beats += 1
            said = NodeStatus(
                epoch=self._call.epoch,
                node=self._node,
                host=socket.gethostname(),
                state=state,
                text=text,
                cause=cause,
                who=self._who,
                beat=self._beats,
                hint=hint,
            )
            for _ in range(_TRIES):
                with contextlib.suppress(StoreError):
                    publish_status(self._place, said)
                    return

    def _report_event(self, event: dict[str, Any]) -> None:
        self._context.watch(self._place.ref.stage, event)

    def _log(self, kind: str, text: str) -> None:
        self._context.watch(self._place.ref.stage, {"kind": kind, "text": text})


def _cause_of(error: NanochatError) -> str:
    if isinstance(error, JobFailed):
        return error.cause or ""
    return "" if is_retryable(error) else MISTAKE
