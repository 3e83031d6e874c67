"""Node 0 of a stage on several nodes: calls the others together, and brings their files home.

It builds as one machine does (flows/build/build.py); this is what it does besides. What the others
do is in flows/build/nodes.py.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from flows.artifacts import checkpoints
from flows.build.checkpoint_shards import SECONDS_BETWEEN_LOOKS, gather_shards, telling_of
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
from flows.leases.held_lease import HeldLease, LeaseTimings
from infra.launch.background import run_in_background
from infra.launch.rendezvous import Rendezvous, own_endpoint, store_host
from infra.launch.torchrun import SECONDS_TO_STOP, SHUTDOWN_TIMEOUT, JobFailed, StageInterrupted
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, NanochatError, StageError, StoreError
from nanochat_core.job import Job

# In which the node that failed first says so: after torchrun has ended its ranks, and what they
# saved is sent.
_SECONDS_FOR_A_REASON = SHUTDOWN_TIMEOUT + 8.0
_SECONDS_BETWEEN_QUESTIONS = 2.0
_AGAIN = "run the same command again: it goes on from the last checkpoint once all nodes are there"
_UNREACHABLE = (StoreError, ArtifactError)


class NodeLost(JobFailed):
    """A node is gone, was stopped, or never came; begun again, the job goes on where it saved."""


class Coordinator:
    """The other nodes, as node 0 sees them."""

    def __init__(
        self,
        job: Job,
        place: MessagePrefix,
        call: StartMessage,
        lease: HeldLease,
        *,
        terms: LeaseTimings,
        tell: Callable[[str], None],
        warn: Callable[[NanochatError], None],
    ) -> None:
        self.ending = threading.Event()  # the lease is lost, the run is stopped, or a node is lost
        self.parts: list[File] = []  # of the checkpoint that is being written, in the store
        self._job = job
        self._place = place
        self._call = call
        self._lease = lease
        self._terms = terms
        self._tell = tell
        self._warn = warn
        self._lost: StageError | None = None
        self._who: dict[int, str] = {}  # who answered as which node when all were ready
        self._step = 0  # of the parts

    @property
    def meeting(self) -> Rendezvous:
        """Node 0's part in it."""
        return meeting_of(self._call, self._place, node=0)

    def assemble(self) -> None:
        """Call all nodes, and wait until each is ready, the longer while they fetch.

        Raises NodeLost when one does not come, and what one says that cannot take part.
        """
        self._announce()
        deadline = time.monotonic() + self._terms.meet
        say = time.monotonic()
        while True:
            heard = self._heard()
            if (reason := self._reason(heard.values())) is not None:
                raise reason
            missing = [n for n in self._others() if n not in heard or heard[n].state != "ready"]
            if not missing:
                break
            if self._lease.ending.wait(self._terms.look):
                self._lease.raise_if_lost()
                raise StageInterrupted(f"{self._job.stage} was not started: it is being stopped")
            names = ", ".join(map(str, missing))
            is_late = time.monotonic() > deadline
            if is_late and (absent := [node for node in missing if node not in heard]):
                names = ", ".join(map(str, absent))
                raise NodeLost(
                    f"{self._job.stage} needs {self._call.nodes} nodes: node {names} did not come "
                    f"within {self._terms.meet:g} s",
                    hint=f"start it there: nanochat stage {self._job.stage} ... --node {absent[0]}"
                    f" --nodes {self._call.nodes}, with the same store",
                    log_tail="",
                )
            if time.monotonic() >= say:
                say = time.monotonic() + self._terms.say
                self._tell(f"waiting: for node {names} of {self._call.nodes}")
        self._who = {node: said.who for node, said in heard.items()}
        endpoint = own_endpoint(toward=store_host(self._place.store.url))
        self._call = replace(self._call, endpoint=endpoint)
        self._announce()

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """While the block runs, bring the others' files here and see whether they are there."""
        with run_in_background(self._gather, self._watch, self._pass_on):
            yield

    def explain(self, error: StageError) -> StageError:
        """What ended the attempt, when it was another node; else the error itself.

        Waits for what the others say, who may need the time that a rank has to save.
        """
        if not is_retryable(self._lost or error):
            return self._lost or error
        deadline = time.monotonic() + _SECONDS_FOR_A_REASON
        answers: list[tuple[NodeStatus, float]] = []
        reason: StageError | None = None
        while time.monotonic() < deadline:
            with contextlib.suppress(*_UNREACHABLE):
                answers = list(self._answers())
                reason = self._reason([said for said, _ in answers if self._is_ours(said)])
                is_said = all(self._has_said_all(said, age) for said, age in answers)
                if (reason is not None and not is_retryable(reason)) or is_said:
                    break
            if self._lease.ending.wait(min(self._terms.look, _SECONDS_BETWEEN_QUESTIONS)):
                break
        if reason is not None and (self._lost is None or not is_retryable(reason)):
            return reason
        if self._lost is not None:
            return self._lost
        silent = ""
        if answers:
            said, age = max(answers, key=lambda item: item[1])
            silent = f"; node {said.node}, {said.host}, was last heard of {age:.0f} s ago"
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

    def _heard(self) -> dict[int, NodeStatus]:
        """What the others said a short while ago to this call; none while the store is away."""
        with contextlib.suppress(*_UNREACHABLE):
            answers = list(self._answers())
            return {said.node: said for said, age in answers if age <= self._terms.ttl / 2}
        return {}

    def _is_ours(self, said: NodeStatus) -> bool:
        """Whether it is said by who was ready when the attempt began."""
        return said.who == self._who.get(said.node)

    def _has_said_all(self, said: NodeStatus, age: float) -> bool:
        """Whether nothing is to be expected of a node any more."""
        is_silent = age > self._terms.ttl / 2
        return is_silent or not self._is_ours(said) or said.state in ("ended", "leaving")

    def _reason(self, answers: Iterable[NodeStatus]) -> StageError | None:
        """What another node says of itself that would end the attempt.

        An error of the code, or a person's, comes before what only followed from it.
        """
        reasons = [reason for said in answers if (reason := self._reason_of(said))]
        return min(reasons, key=is_retryable, default=None)

    def _reason_of(self, said: NodeStatus) -> StageError | None:
        who = f"node {said.node}, {said.host}"
        if said.state == "leaving":
            text = f"{self._job.stage}: {who}, was told to stop"
            return NodeLost(text, hint=_AGAIN, log_tail="")
        if not said.text:
            return None
        text = f"{said.text} (on {who})"
        if said.cause == MISTAKE:
            return StageError(text, hint=said.hint)
        return NodeLost(text, hint=_AGAIN, log_tail="", cause=said.cause or None)

    def _gather(self, over: threading.Event) -> None:
        ranks = range(self._call.processes, self._call.nodes * self._call.processes)
        while not over.wait(SECONDS_BETWEEN_LOOKS):
            with telling_of(self._job.checkpoints, self._warn):
                for part in gather_shards(
                    self._place.store, self._job, ranks, epoch=self._call.epoch
                ):
                    if part.step != self._step:
                        self._step, self.parts = part.step, []
                    self.parts = [*self.parts, part.file]

    def _pass_on(self, over: threading.Event) -> None:
        """End the attempt with the lease. It asks the store nothing, which may not answer."""
        while not over.wait(SECONDS_BETWEEN_LOOKS):
            if self._lease.ending.is_set():
                self.ending.set()

    def _watch(self, over: threading.Event) -> None:
        """End the attempt when a node is silent for half a lease, or gone and nobody noticed.

        One that was started again is gone too: it says that it is there, but its ranks are not.
        """
        gone_since: float | None = None
        while not over.wait(min(self._terms.beat, _SECONDS_BETWEEN_QUESTIONS)):
            try:
                answers = list(self._answers())
            except _UNREACHABLE:
                continue
            for said, age in answers:
                who = f"node {said.node}, {said.host},"
                if not self._is_ours(said):
                    self._lose(self._gone(f"{who} was started again"))
                elif age > self._terms.ttl / 2:
                    self._lose(self._gone(f"{who} is silent for {age:.0f} s"))
            if any(said.state != "ready" for said, _ in answers):
                gone_since = gone_since or time.monotonic()
                if time.monotonic() - gone_since > SECONDS_TO_STOP:  # no rank noticed
                    reason = self._reason([said for said, _ in answers])
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
    """The part of a node in what was called."""
    assert call.endpoint is not None
    return Rendezvous(
        nodes=call.nodes,
        node=node,
        endpoint=call.endpoint,
        id=f"{place.fingerprint[:12]}-{call.epoch}",
    )


@contextlib.contextmanager
def lead(
    store: Store,
    job: Job,
    lease: HeldLease,
    *,
    nodes: int,
    processes: int,
    terms: LeaseTimings,
    tell: Callable[[str], None],
    warn: Callable[[NanochatError], None],
) -> Generator[Coordinator]:
    """All nodes are ready to go on from this job's newest checkpoint, which the store has too.

    Raises NodeLost when they do not come, LeaseLost, StoreError.
    """
    newest = checkpoints.settle(job)
    if newest is not None:
        _store(store, job, newest, lease)
    call = StartMessage(
        epoch=lease.epoch,
        owner=lease.owner,
        host=socket.gethostname(),
        nodes=nodes,
        processes=processes,
        step=checkpoints.step_of(newest) if newest else 0,
        commit=checkpoints.commit_of(newest) if newest else "",
        endpoint=None,
    )
    place = MessagePrefix(store=store, stage=job.stage, fingerprint=job.fingerprint)
    leader = Coordinator(job, place, call, lease, terms=terms, tell=tell, warn=warn)
    leader.assemble()
    with leader.watching():
        yield leader


def _store(store: Store, job: Job, directory: Path, lease: HeldLease) -> None:
    """The others can begin only with what the store has."""
    if not checkpoints.is_stored(store, job, directory):
        checkpoints.send(
            store, job, directory, owner=lease.owner, epoch=lease.epoch, fence=lease.check
        )
