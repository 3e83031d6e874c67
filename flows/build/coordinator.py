"""Node 0 of a stage on several nodes: starts the other nodes, watches them, fetches their shards.

Otherwise node 0 builds as a single machine does (flows/build/build.py). The other nodes' side is
flows/build/nodes.py and flows/build/follower.py.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from flows.artifacts import checkpoints
from flows.build.checkpoint_shards import SECONDS_BETWEEN_LOOKS, gather_shards, reporting_errors
from flows.build.messages import (
    MISTAKE,
    MessagePrefix,
    NodeStatus,
    StartMessage,
    find_status,
    publish_start,
)
from flows.build.retry import is_retryable
from flows.identity.manifest import File
from flows.identity.ref import ArtifactRef, short
from flows.leases.held_lease import HeldLease, LeaseTimings
from flows.render.text import duration
from infra.launch.background import run_in_background
from infra.launch.rendezvous import Rendezvous, find_port, own_address, store_host
from infra.launch.torchrun import SECONDS_TO_STOP, SHUTDOWN_TIMEOUT, JobFailed, StageInterrupted
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, NanochatError, StageError, StoreError
from nanochat_core.job import Job

# Seconds to wait for the node that failed first to report why: its torchrun ends the ranks
# (SHUTDOWN_TIMEOUT), then it uploads what they saved.
_SECONDS_FOR_A_REASON = SHUTDOWN_TIMEOUT + 8.0
_SECONDS_BETWEEN_QUESTIONS = 2.0
_AGAIN = (
    "if it is not retried by itself, run the same command again: it resumes from the last "
    "checkpoint once all nodes are up"
)
_UNREACHABLE = (StoreError, ArtifactError)


class NodeLost(JobFailed):
    """A node lost connection, was stopped or never joined; a retry resumes from the checkpoint."""


class Coordinator:
    """Node 0's view of the other nodes during one attempt."""

    def __init__(
        self,
        job: Job,
        place: MessagePrefix,
        call: StartMessage,
        lease: HeldLease,
        *,
        address: str | None,
        terms: LeaseTimings,
        log: Callable[[str], None],
        warn: Callable[[NanochatError], None],
    ) -> None:
        self._address = address
        self.ending = threading.Event()  # the lease is lost, the run is stopped, or a node is lost
        self.parts: list[File] = []  # uploaded shards of the checkpoint that is being written
        self._job = job
        self._place = place
        self._call = call
        self._lease = lease
        self._terms = terms
        self._log = log
        self._warn = warn
        self._lost: StageError | None = None
        self._who: dict[int, str] = {}  # node -> id of its process when all were ready
        self._step = 0  # that `parts` belong to

    @property
    def meeting(self) -> Rendezvous:
        """Return the rendezvous as node 0 joins it."""
        return meeting_of(self._call, self._place, node=0)

    def assemble(self) -> None:
        """Publish the start message and wait until every node is ready.

        Raises NodeLost if a node does not report within `terms.meet` seconds (one that reports but
        still fetches is waited for without limit), and the error of a node that cannot take part.
        """
        self._announce()
        deadline = time.monotonic() + self._terms.meet
        next_line = time.monotonic()
        while True:
            fresh = self._find_fresh()
            if (reason := self._reason(fresh.values())) is not None:
                raise reason
            missing = [n for n in self._others() if n not in fresh or fresh[n].state != "ready"]
            if not missing:
                break
            if self._lease.ending.wait(self._terms.look):
                self._lease.raise_if_lost()
                raise StageInterrupted(f"{self._job.stage} was not started: it is being stopped")
            names = ", ".join(map(str, missing))
            # Late are nodes that never reported. One that is "coming" has joined: it may fetch
            # gigabytes, and its heartbeats show that it is alive.
            is_late = time.monotonic() > deadline
            if is_late and (absent := [node for node in missing if node not in fresh]):
                names = ", ".join(map(str, absent))
                raise NodeLost(
                    f"{self._job.stage} needs {self._call.nodes} nodes: node {names} did not come "
                    f"within {duration(self._terms.meet)}",
                    hint=f"start it there: nanochat stage {self._job.stage} ... --node {absent[0]}"
                    f" --nodes {self._call.nodes}, with the same store",
                    log_tail="",
                )
            if time.monotonic() >= next_line:
                next_line = time.monotonic() + self._terms.say
                self._log(f"waiting: for node {names} of {self._call.nodes}")
        # From here on another `who` under the same number is a restarted process without ranks.
        self._who = {node: status.who for node, status in fresh.items()}
        address = self._address or own_address(toward=store_host(self._place.store.url))
        endpoint = f"{address}:{find_port()}"
        # The endpoint is published only now: a follower starts its ranks as soon as it reads one.
        self._call = replace(self._call, endpoint=endpoint)
        self._announce()

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Fetch the other nodes' shards and watch their heartbeats while the block runs."""
        with run_in_background(self._gather, self._watch, self._pass_on):
            yield

    def explain(self, error: StageError) -> StageError:
        """Return the error that ended the attempt: another node's if there is one, else `error`.

        Waits for the other nodes' reports, which may take as long as a rank may take to save.
        """
        # Already known to be what a person must fix: no other report would be more precise.
        if not is_retryable(self._lost or error):
            return self._lost or error
        # Our own error is often only the echo of another rank's: collectives fail on all of them.
        deadline = time.monotonic() + _SECONDS_FOR_A_REASON
        answers: list[tuple[NodeStatus, float]] = []
        reason: StageError | None = None
        while time.monotonic() < deadline:
            with contextlib.suppress(*_UNREACHABLE):
                answers = list(self._answers())
                reason = self._reason([status for status, _ in answers if self._is_ours(status)])
                have_all_reported = all(
                    self._has_reported_all(status, age) for status, age in answers
                )
                # A retryable report may be an echo too: wait until every node has reported.
                if (reason is not None and not is_retryable(reason)) or have_all_reported:
                    break
            if self._lease.ending.wait(min(self._terms.look, _SECONDS_BETWEEN_QUESTIONS)):
                break
        if reason is not None and (self._lost is None or not is_retryable(reason)):
            return reason
        if self._lost is not None:
            return self._lost
        silent = ""
        if answers:
            status, age = max(answers, key=lambda item: item[1])
            silent = f"; node {status.node}, {status.host}, was last heard of {duration(age)} ago"
        log_tail = error.log_tail if isinstance(error, JobFailed) else ""
        return NodeLost(f"{error}{silent}", hint=_AGAIN, log_tail=log_tail)

    def _announce(self) -> None:
        publish_start(self._place, self._call, fence=self._lease.check)

    def _others(self) -> range:
        return range(1, self._call.nodes)

    def _find(self, node: int) -> tuple[NodeStatus, float] | None:
        return find_status(self._place, node, epoch=self._call.epoch)

    def _answers(self) -> Iterator[tuple[NodeStatus, float]]:
        for node in self._others():
            if found := self._find(node):
                yield found

    def _find_fresh(self) -> dict[int, NodeStatus]:
        """Return fresh statuses by node. Empty while the store is unavailable."""
        with contextlib.suppress(*_UNREACHABLE):
            answers = list(self._answers())
            # Half a lease without a heartbeat counts as silent, as in `_watch`.
            return {status.node: status for status, age in answers if age <= self._terms.ttl / 2}
        return {}

    def _is_ours(self, status: NodeStatus) -> bool:
        """Return whether a status is from the process that was ready when the attempt began."""
        return status.who == self._who.get(status.node)

    def _has_reported_all(self, status: NodeStatus, age: float) -> bool:
        """Return whether a node will report nothing more in this attempt."""
        is_silent = age > self._terms.ttl / 2
        return is_silent or not self._is_ours(status) or status.state in ("ended", "leaving")

    def _reason(self, answers: Iterable[NodeStatus]) -> StageError | None:
        """Return the error that another node reports, if any.

        One that a retry cannot fix comes first: retryable ones are often its consequence.
        """
        reasons = [reason for status in answers if (reason := self._reason_of(status))]
        return min(reasons, key=is_retryable, default=None)

    def _reason_of(self, status: NodeStatus) -> StageError | None:
        who = f"node {status.node}, {status.host}"
        if status.state == "leaving":
            text = f"{self._job.stage}: {who}, was stopped"
            return NodeLost(text, hint=_AGAIN, log_tail="")
        if not status.text:
            return None
        text = f"{status.text} (on {who})"
        if status.cause == MISTAKE:
            return StageError(text, hint=status.hint)
        return NodeLost(text, hint=_AGAIN, log_tail="", cause=status.cause or None)

    def _gather(self, over: threading.Event) -> None:
        ranks = range(self._call.processes, self._call.nodes * self._call.processes)
        while not over.wait(SECONDS_BETWEEN_LOOKS):
            with reporting_errors(self._job.checkpoints, self._warn):
                for part in gather_shards(
                    self._place.store, self._job, ranks, epoch=self._call.epoch
                ):
                    # Shards of one step at a time: a new step means the last one is committed or
                    # was dropped.
                    if part.step != self._step:
                        self._step, self.parts = part.step, []
                    self.parts = [*self.parts, part.file]

    def _pass_on(self, over: threading.Event) -> None:
        """End the attempt when the lease is lost. No requests: the store may hang for minutes."""
        while not over.wait(SECONDS_BETWEEN_LOOKS):
            if self._lease.ending.is_set():
                self.ending.set()

    def _watch(self, over: threading.Event) -> None:
        """End the attempt if a node is silent for half a lease, restarted, or without ranks.

        A restarted node sends heartbeats, but its ranks are gone.
        """
        gone_since: float | None = None
        while not over.wait(min(self._terms.beat, _SECONDS_BETWEEN_QUESTIONS)):
            try:
                answers = list(self._answers())
            except _UNREACHABLE:
                continue
            for status, age in answers:
                who = f"node {status.node}, {status.host},"
                if not self._is_ours(status):
                    self._lose(self._gone(f"{who} was started again"))
                elif age > self._terms.ttl / 2:
                    self._lose(self._gone(f"{who} is silent for {duration(age)}"))
            if any(status.state != "ready" for status, _ in answers):
                gone_since = gone_since or time.monotonic()
                # Normally our own ranks fail or save first, and that ends the attempt. After this
                # many seconds they have not noticed: gloo and NCCL may block for much longer.
                if time.monotonic() - gone_since > SECONDS_TO_STOP:
                    reason = self._reason([status for status, _ in answers])
                    self._lose(reason or self._gone("the ranks of another node have ended"))
            else:
                gone_since = None

    def _gone(self, what: str) -> NodeLost:
        return NodeLost(f"{self._job.stage}: {what}", hint=_AGAIN, log_tail="")

    def _lose(self, reason: StageError) -> None:
        if self._lost is None:
            self._lost = reason
            self.ending.set()


def meeting_of(call: StartMessage, place: MessagePrefix, *, node: int) -> Rendezvous:
    """Return the torchrun rendezvous of a start message, as `node` joins it."""
    assert call.endpoint is not None
    return Rendezvous(
        nodes=call.nodes,
        node=node,
        endpoint=call.endpoint,
        id=f"{short(place.ref.fingerprint)}-{call.epoch}",  # another for each attempt
    )


@contextlib.contextmanager
def lead(
    store: Store,
    job: Job,
    lease: HeldLease,
    *,
    nodes: int,
    processes: int,
    address: str | None,
    terms: LeaseTimings,
    log: Callable[[str], None],
    warn: Callable[[NanochatError], None],
) -> Generator[Coordinator]:
    """Start all nodes from this job's newest checkpoint and watch them while the block runs.

    Uploads that checkpoint first if the store lacks it. Raises NodeLost if a node does not join,
    LeaseLost, StoreError.
    """
    newest = checkpoints.settle(job)
    if newest is not None:
        _store(store, job, newest, lease)
    call = StartMessage(
        epoch=lease.fencing_token,
        owner=lease.owner,
        host=socket.gethostname(),
        nodes=nodes,
        processes=processes,
        step=checkpoints.step_of(newest) if newest else 0,
        commit=checkpoints.commit_of(newest) if newest else "",
        endpoint=None,
    )
    place = MessagePrefix(store=store, ref=ArtifactRef(job.stage, job.fingerprint))
    leader = Coordinator(job, place, call, lease, address=address, terms=terms, log=log, warn=warn)
    leader.assemble()
    with leader.watching():
        yield leader


def _store(store: Store, job: Job, directory: Path, lease: HeldLease) -> None:
    """Upload the checkpoint unless it is stored: other nodes can fetch it only from the store."""
    if not checkpoints.is_stored(store, job, directory):
        checkpoints.send(
            store,
            job,
            directory,
            owner=lease.owner,
            fencing_token=lease.fencing_token,
            fence=lease.check,
        )
