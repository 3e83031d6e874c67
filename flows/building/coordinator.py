"""Node 0 of a stage on several nodes: starts the other nodes, watches them, notes their shards.

Otherwise node 0 builds as a single machine does (flows/building/build.py). The other nodes' side is
flows/building/nodes.py.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flows.artifacts import checkpoints
from flows.building.checkpoint_shards import note_shard
from flows.building.context import BuildContext
from flows.building.messages import MISTAKE, CheckpointShard, Start, Status, read_message
from flows.building.retry import is_retryable
from flows.identity.manifest import File
from flows.identity.ref import short
from flows.leases.held_lease import HeldLease, LeaseTimings
from flows.leases.outage import WaitLog
from flows.render.text import duration
from infra.launch.background import run_in_background
from infra.launch.fitting import note_too_large
from infra.launch.link import Link, LinkLost, accept_links
from infra.launch.rendezvous import (
    NODE,
    NODES,
    Rendezvous,
    find_interface,
    find_port,
    own_address,
    store_host,
)
from infra.launch.torchrun import JobFailed, StageInterrupted
from infra.polling import MARGIN_SECONDS, POLL_SECONDS
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, OutOfMemory, StageError
from nanochat_core.job import Job

SECONDS_BETWEEN_BEATS = 2.0
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

    @property
    def has_ended(self) -> bool:
        """True if it will report nothing more in this attempt."""
        return self.lost is not None or self.status.state in ("ended", "leaving")


class Coordinator:
    """Node 0's view of the other nodes during one attempt."""

    def __init__(
        self,
        job: Job,
        start: Start,
        lease: HeldLease,
        *,
        terms: LeaseTimings,
        log: Callable[[str], None],
    ) -> None:
        self.ending = threading.Event()  # the lease is lost, the run is stopped, or a node is lost
        self._job = job
        self._grace = job.resources.grace_seconds
        self._start = start
        self._lease = lease
        self._terms = terms
        self._log = log
        self._peers: dict[int, _Peer] = {}
        self._shards: dict[int, tuple[File, ...]] = {}  # by step, of the other nodes, in the store
        self._lock = threading.Lock()  # around changes of `_peers` and `_shards`

    @property
    def rendezvous(self) -> Rendezvous:
        """Return the rendezvous as node 0 joins it."""
        return rendezvous_of(self._start, self._job, node=0)

    def shards(self, step: int) -> tuple[File, ...]:
        """Return the other nodes' files of a committed checkpoint, which are in the store."""
        with self._lock:  # those before stay until now: a later step may be given up
            self._shards = {s: files for s, files in self._shards.items() if s >= step}
            return self._shards.get(step, ())

    def assemble(self, address: str) -> None:
        """Wait until every node is ready, and start the ranks of all.

        `address` is this machine's for the others. Raises NodeLost if a node does not connect
        within `terms.meet` seconds (one that is connected and still fetches is waited for without
        limit), and the error of a node that cannot take part.
        """
        deadline = time.monotonic() + self._terms.meet
        waiting = WaitLog(self._log, every=self._terms.report)
        while True:
            if errors := self._reports():
                raise errors[0]
            here = {n: peer.status.state for n, peer in self._peers.items() if not peer.lost}
            missing = [n for n in range(1, self._start.nodes) if here.get(n) != "ready"]
            if not missing:
                break
            if self._lease.ending.wait(min(self._terms.poll, POLL_SECONDS)):
                self._lease.raise_if_lost()
                raise StageInterrupted(f"{self._job.stage} was not started: it is being stopped")
            absent = [node for node in missing if node not in here]
            if absent and time.monotonic() > deadline:
                raise NodeLost(
                    f"{self._job.stage} needs {self._start.nodes} nodes: node "
                    f"{', '.join(map(str, absent))} did not come within "
                    f"{duration(self._terms.meet)}",
                    hint="give the same command there, with the same store and "
                    f"{NODES}={self._start.nodes} {NODE}={absent[0]}",
                    log_tail="",
                )
            names = ", ".join(map(str, missing))
            waiting.report(names, f"waiting: for node {names} of {self._start.nodes}")
        with self._lock:
            self._start = replace(self._start, endpoint=f"{address}:{find_port()}")
            for peer in self._peers.values():
                peer.link.send(asdict(self._start))

    @contextlib.contextmanager
    def listening(self, listener: socket.socket) -> Generator[None]:
        """Take the other nodes' connections and messages, and watch them, while the block runs."""
        with run_in_background(lambda over: self._accept(listener, over), self._beat, self._watch):
            try:
                yield
            finally:
                for peer in list(self._peers.values()):
                    peer.link.close()

    def explain(self, error: StageError) -> StageError:
        """Return the error that ended the attempt: another node's if there is one, else `error`.

        Waits for the other nodes' reports, which may take as long as a rank may take to save.
        """
        # Our own error is often only the echo of another rank's: collectives fail on all of them. A
        # retryable report may be an echo too: wait until every node has reported. The ranks of the
        # one that failed first end, then it uploads what they saved.
        deadline = time.monotonic() + self._grace + MARGIN_SECONDS
        while is_retryable(
            reason := min([*self._reports(), *self._gone(), error], key=is_retryable)
        ):
            if time.monotonic() > deadline or all(p.has_ended for p in self._peers.values()):
                break
            if self._lease.ending.wait(POLL_SECONDS):
                break
        if any(isinstance(report, OutOfMemory) for report in self._reports()):
            note_too_large(self._job)  # the next attempt has a size that fits all nodes
        if reason is not error or not is_retryable(error):
            return reason
        log_tail = error.log_tail if isinstance(error, JobFailed) else ""
        return NodeLost(str(error), hint=_AGAIN, log_tail=log_tail)

    def _accept(self, listener: socket.socket, over: threading.Event) -> None:
        silence = self._terms.ttl / 2
        for link in accept_links(listener, silence=silence, over=over):
            threading.Thread(target=self._hear, args=(link,), daemon=True).start()

    def _hear(self, link: Link) -> None:
        """Take the messages of one connection until it ends; close it unless it has the secret."""
        peer: _Peer | None = None
        try:
            if not link.begins_with(self._lease.record.owner):
                return
            link.send(asdict(self._start))
            while True:
                status = read_message(Status, link.receive())
                if peer is None and (peer := self._admit(link, status)) is None:
                    return
                peer.status = status
                if status.shard is not None:
                    self.note(status.shard)
        except LinkLost as error:
            if peer is not None:
                peer.lost = str(error)
        finally:
            link.close()

    def _admit(self, link: Link, status: Status) -> _Peer | None:
        """Return the node as a peer; None if it cannot be one of this attempt."""
        if status.epoch != self._start.epoch or not 0 < status.node < self._start.nodes:
            return None
        with self._lock:
            known = self._peers.get(status.node)
            if known is not None and not known.lost:
                refused = f"node {status.node} is on host {known.status.host} too"
                link.send(asdict(replace(self._start, refused=refused)))
                return None
            # Once the ranks have started, a process that comes has none of them.
            if self._start.endpoint is not None:
                return None
            peer = self._peers[status.node] = _Peer(link=link, status=status)
            return peer

    def note(self, shard: CheckpointShard) -> None:
        """Remember another node's shard, and record it where rank 0 waits for it."""
        with self._lock:
            files = self._shards.get(shard.step, ())
            self._shards = {**self._shards, shard.step: (*files, shard.file)}
        try:
            # Last: then rank 0 may commit, and the checkpoint is sent.
            note_shard(self._job, shard, epoch=self._start.epoch)
        except FileNotFoundError:
            pass  # the job has dropped this checkpoint
        except ArtifactError as error:
            raise LinkLost(str(error)) from error

    def _beat(self, over: threading.Event) -> None:
        while not over.wait(min(self._terms.beat, SECONDS_BETWEEN_BEATS)):
            for peer in list(self._peers.values()):
                peer.link.send({})

    def _watch(self, over: threading.Event) -> None:
        """End the attempt when the lease is lost, or a node or its ranks are gone."""
        failed_since: float | None = None
        while not over.wait(POLL_SECONDS):
            if self._lease.ending.is_set():
                self.ending.set()
            gone = self._gone()
            # Before the ranks start, another process may still take the place of one that is gone.
            if self._start.endpoint is None or not (gone or self._reports()):
                continue
            failed_since = failed_since or time.monotonic()
            # Normally our own ranks fail or save first, and that ends the attempt. After this many
            # seconds they have not noticed: gloo and NCCL may block for much longer.
            if gone or time.monotonic() - failed_since > self._grace:
                self.ending.set()

    def _reports(self) -> list[StageError]:
        """Return the errors that other nodes reported, those that a retry cannot fix first."""
        reasons = [self._reason_of(peer) for peer in list(self._peers.values())]
        return sorted((reason for reason in reasons if reason), key=is_retryable)

    def _gone(self) -> list[StageError]:
        """Return an error for each node whose connection ended before it reported an end."""
        return [
            self._node_lost(peer, peer.lost)
            for peer in list(self._peers.values())
            if peer.lost and peer.status.state in ("coming", "ready")
        ]

    def _reason_of(self, peer: _Peer) -> StageError | None:
        status = peer.status
        if status.state == "leaving":
            return self._node_lost(peer, "was stopped")
        if not status.text:
            return None
        text = f"{status.text} (on node {status.node}, {status.host})"
        if status.cause == MISTAKE:
            return StageError(text, hint=status.hint)
        if status.cause == OutOfMemory.__name__:
            return OutOfMemory(text, hint=status.hint)
        return NodeLost(text, hint=_AGAIN, log_tail="", cause=status.cause or None)

    def _node_lost(self, peer: _Peer, what: str) -> NodeLost:
        text = f"{self._job.stage}: node {peer.status.node}, {peer.status.host}, {what}"
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
    if newest is not None:
        _store(store, job, newest, lease)
    start = Start(
        epoch=lease.record.epoch,
        host=socket.gethostname(),
        nodes=nodes,
        processes=processes,
        step=checkpoints.step_of(newest) if newest else 0,
        commit=checkpoints.commit_of(newest) if newest else "",
        device_batch_size=job.resources.device_batch_size,
    )
    address = own_address(toward=store_host(store.url))
    log = context.log(job.stage, "waiting")
    coordinator = Coordinator(job, start, lease, terms=context.terms, log=log)
    # A name that is not of an interface here (Debian's 127.0.1.1) may be right for the others.
    with socket.create_server((address if find_interface(address) else "", 0)) as listener:
        lease.note(endpoint=f"{address}:{listener.getsockname()[1]}")
        lease.renew()
        with coordinator.listening(listener):
            coordinator.assemble(address)
            yield coordinator


def _store(store: Store, job: Job, directory: Path, lease: HeldLease) -> None:
    """Upload the checkpoint unless it is stored: other nodes can fetch it only from the store."""
    if not checkpoints.is_stored(store, job, directory):
        checkpoints.send(
            store,
            job,
            directory,
            owner=lease.record.owner,
            fencing_token=lease.record.epoch,
            check_lease=lease.check,
        )
