"""Node 0 of a stage on several nodes: starts the other nodes, watches them, notes their shards.

Otherwise node 0 builds as a single machine does (flows/building/build.py). The other nodes' side is
flows/building/nodes.py.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from flows.artifacts import checkpoints
from flows.building.checkpoint_shards import file_of, note_shard
from flows.building.context import BuildContext
from flows.building.messages import CheckpointShard, Start, Status, read_message
from flows.building.retry import is_retryable
from flows.identity.manifest import File
from flows.identity.ref import short
from flows.leases.held_lease import HeldLease, LeaseTimings
from flows.leases.outage import WaitLog
from flows.render.text import duration
from infra.launch.background import run_in_background
from infra.launch.fitting import note_too_large
from infra.launch.link import Link, LinkLost
from infra.launch.rendezvous import (
    NODE,
    NODES,
    Rendezvous,
    find_interface,
    find_port,
    own_address,
)
from infra.launch.torchrun import JobFailed, StageInterrupted
from infra.polling import MARGIN_SECONDS, POLL_SECONDS
from nanochat_core.errors import OutOfMemory, StageError
from nanochat_core.job import Job

_AGAIN = (
    "if it is not retried by itself, run the same command again: it resumes from the last "
    "checkpoint once all nodes are up"
)


class NodeLost(JobFailed):
    """A node lost connection, was stopped or never joined; a retry resumes from the checkpoint."""


@dataclass
class _Peer:
    """Another node, as far as it has reported."""

    link: Link
    status: Status
    lost: str | None = None  # how its connection ended


@dataclass
class Coordinator:
    """Node 0's view of the other nodes during one attempt."""

    job: Job
    start: Start
    lease: HeldLease
    stop: threading.Event  # of the run
    terms: LeaseTimings
    log: Callable[[str], None]
    # Set when the lease is lost, the run is stopped, or a node is lost or has failed.
    ending: threading.Event = field(default_factory=threading.Event, init=False)
    _peers: dict[int, _Peer] = field(default_factory=dict[int, _Peer], init=False)
    # By step, of the other nodes, in the store.
    _shards: dict[int, list[File]] = field(default_factory=dict[int, list[File]], init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)  # of `_peers`

    @property
    def rendezvous(self) -> Rendezvous:
        """Return the rendezvous as node 0 joins it."""
        return rendezvous_of(self.start, self.job, node=0)

    def shards(self, step: int) -> list[File]:
        """Return the other nodes' files of a committed checkpoint, which are in the store."""
        return self._shards.get(step, [])

    def assemble(self, address: str) -> None:
        """Wait until every node is ready, and start the ranks of all.

        `address` is this machine's for the others. Raises NodeLost if a node does not connect
        within `terms.meet` seconds (one that is connected and still fetches is waited for without
        limit), and the error of a node that cannot take part.
        """
        deadline = time.monotonic() + self.terms.meet
        waiting = WaitLog(self.log, every=self.terms.report)
        while True:
            if errors := self._errors():
                raise errors[0]
            with self._lock:  # a node that is lost from here on is lost from the attempt
                here = {number: peer.status.state for number, peer in self._peers.items()}
                missing = [n for n in range(1, self.start.nodes) if here.get(n) != "ready"]
                if not missing:
                    self.start = replace(self.start, endpoint=f"{address}:{find_port()}")
                    for peer in self._peers.values():
                        peer.link.send(asdict(self.start))
                    return
            if self.stop.wait(min(self.terms.poll, POLL_SECONDS)):
                raise StageInterrupted(f"{self.job.stage} was not started: it is being stopped")
            self.lease.raise_if_lost()
            absent = [node for node in missing if node not in here]
            if absent and time.monotonic() > deadline:
                raise NodeLost(
                    f"{self.job.stage} needs {self.start.nodes} nodes: node "
                    f"{', '.join(map(str, absent))} did not come within "
                    f"{duration(self.terms.meet)}",
                    hint="give the same command there, with the same store and "
                    f"{NODES}={self.start.nodes} {NODE}={absent[0]}",
                    log_tail="",
                )
            names = ", ".join(map(str, missing))
            waiting.report(names, f"waiting: for node {names} of {self.start.nodes}")

    def explain(self, error: StageError) -> StageError:
        """Return the error that ended the attempt: another node's if there is one, else `error`.

        Waits for the other nodes' reports, which may take as long as a rank may take to save.
        """
        # Our own error is often only the echo of another rank's: collectives fail on all of them. A
        # retryable report may be an echo too: wait until every node has reported. The ranks of the
        # one that failed first end, then it uploads what they saved.
        deadline = time.monotonic() + self.job.resources.grace_seconds + MARGIN_SECONDS
        while is_retryable(reason := min([*self._errors(), error], key=is_retryable)):
            peers = self._peers.values()
            have_ended = all(peer.lost or peer.status.state == "ended" for peer in peers)
            if have_ended or self.lease.lost or time.monotonic() > deadline:
                break
            if self.stop.wait(POLL_SECONDS):
                break
        if any(isinstance(report, OutOfMemory) for report in self._errors()):
            note_too_large(self.job)  # the next attempt has a size that fits all nodes
        if reason is not error or not is_retryable(error):
            return reason
        log_tail = error.log_tail if isinstance(error, JobFailed) else ""
        return NodeLost(str(error), hint=_AGAIN, log_tail=log_tail)

    def watch(self, listener: socket.socket, over: threading.Event) -> None:
        """Accept connections, send signs of life, and end the attempt when it cannot succeed.

        When this is over it closes the connections.
        """
        listener.settimeout(POLL_SECONDS)
        while not over.is_set():
            with contextlib.suppress(OSError):  # none came, or it has ended already
                link = Link(listener.accept()[0], silence=self.terms.ttl / 2)
                threading.Thread(target=self._hear, args=(link,), daemon=True).start()
            for peer in list(self._peers.values()):
                peer.link.send({})
            # Our own ranks may notice much later that others are gone: gloo and NCCL block. Before
            # the ranks start, `assemble` raises the error.
            has_failed = self.start.endpoint is not None and self._errors()
            if self.stop.is_set() or self.lease.lost or has_failed:
                self.ending.set()
        for peer in list(self._peers.values()):
            peer.link.close()

    def _hear(self, link: Link) -> None:
        """Take the messages of one connection until it ends; close it unless it has the secret."""
        peer: _Peer | None = None
        try:
            if not link.begins_with(self.lease.record.owner):
                return
            link.send(asdict(self.start))
            while True:
                status = read_message(Status, link.receive())
                if peer is None and (peer := self._admit(link, status)) is None:
                    return
                peer.status = status
                if status.shard is not None:
                    self.note(status.shard)
        except LinkLost as error:
            if peer is not None:
                self._lose(peer, str(error))
        finally:
            link.close()

    def _admit(self, link: Link, status: Status) -> _Peer | None:
        """Return the node as a peer; None if it cannot be one of this attempt."""
        if not 0 < status.node < self.start.nodes:
            return None
        with self._lock:
            known = self._peers.get(status.node)
            if known is not None and not known.lost:
                refused = f"node {status.node} is on host {known.status.host} too"
                link.send(asdict(replace(self.start, refused=refused)))
                return None
            # Once the ranks have started, a process that comes has none of them.
            if self.start.endpoint is not None:
                return None
            peer = self._peers[status.node] = _Peer(link=link, status=status)
            return peer

    def _lose(self, peer: _Peer, reason: str) -> None:
        with self._lock:
            peer.lost = reason
            # Before the ranks start, another process may take its place.
            if self.start.endpoint is None and not peer.status.text:
                del self._peers[peer.status.node]

    def note(self, shard: CheckpointShard) -> None:
        """Remember another node's shard, and record it where rank 0 waits for it."""
        file = file_of(self.job, shard, epoch=self.start.epoch)
        self._shards.setdefault(shard.step, []).append(file)
        # Last: then rank 0 may commit, and the checkpoint is sent.
        with contextlib.suppress(FileNotFoundError):  # the job has dropped this checkpoint
            note_shard(self.job, shard)

    def _errors(self) -> list[StageError]:
        """Return why other nodes ended, the errors that a retry cannot fix first."""
        errors = [self._error_of(peer) for peer in list(self._peers.values())]
        return sorted((error for error in errors if error), key=is_retryable)

    def _error_of(self, peer: _Peer) -> StageError | None:
        status = peer.status
        if status.text:
            text = f"{status.text} (on node {status.node}, {status.host})"
            if status.failure == "mistake":
                return StageError(text, hint=status.hint)
            if status.failure == "memory":
                return OutOfMemory(text, hint=status.hint)
        elif peer.lost and status.state != "ended":
            text = f"{self.job.stage}: node {status.node}, {status.host}, {peer.lost}"
        else:
            return None
        return NodeLost(text, hint=_AGAIN, log_tail="")


def rendezvous_of(start: Start, job: Job, *, node: int) -> Rendezvous:
    """Return the rendezvous of an attempt's ranks, as `node` joins it."""
    assert start.endpoint is not None
    return Rendezvous(
        nodes=start.nodes,
        node=node,
        endpoint=start.endpoint,
        id=f"{short(job.fingerprint)}-{start.epoch}",  # another for each attempt
    )


@contextlib.contextmanager
def lead(
    context: BuildContext, job: Job, lease: HeldLease, *, nodes: int, processes: int
) -> Generator[Coordinator]:
    """Start all nodes from this job's newest checkpoint and watch them while the block runs.

    Uploads that checkpoint first if the store lacks it. Raises NodeLost if a node does not join,
    LeaseLost, StoreError.
    """
    store = context.store
    newest = checkpoints.settle(job)
    # Other nodes can fetch it only from the store.
    if newest is not None and not checkpoints.is_stored(store, job, newest):
        checkpoints.send(
            store,
            job,
            newest,
            owner=lease.record.owner,
            fencing_token=lease.record.epoch,
            check_lease=lease.check,
        )
    start = Start(
        epoch=lease.record.epoch,
        host=socket.gethostname(),
        nodes=nodes,
        processes=processes,
        step=checkpoints.step_of(newest) if newest else 0,
        commit=checkpoints.commit_of(newest) if newest else "",
        device_batch_size=job.resources.device_batch_size,
    )
    address = own_address()
    log = context.log(job.stage, "waiting")
    coordinator = Coordinator(job, start, lease, context.stop, context.terms, log)
    # A name that is not of an interface here (Debian's 127.0.1.1) may be right for the others.
    with socket.create_server((address if find_interface(address) else "", 0)) as listener:
        lease.note(endpoint=f"{address}:{listener.getsockname()[1]}")
        lease.renew()
        with run_in_background(partial(coordinator.watch, listener)):
            coordinator.assemble(address)
            yield coordinator
