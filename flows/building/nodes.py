"""Build one stage on several machines (nodes), each with its own disk.

Node 0 builds the stage as one machine would (build.py and coordinator.py here). The others fetch
the inputs, connect to node 0 at the address in its lease, fetch the checkpoint that it names, run
their ranks, and upload what these save. They hold no lease and publish nothing.
If an attempt ends without the artifact, they wait for node 0's next lease.
"""

import contextlib
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

from flows.artifacts import checkpoints
from flows.artifacts.cache import Cache
from flows.building.build import (
    Lookup,
    build,
    find_usable,
    finish,
    look_up,
    reporting_failure,
    reuse,
)
from flows.building.checkpoint_shards import uploading_shards
from flows.building.code_check import CodeCheck
from flows.building.context import BuildContext, Built
from flows.building.coordinator import rendezvous_of
from flows.building.executions import append_segment
from flows.building.job import (
    fetch_inputs,
    make_check,
    make_job,
    nodes_of,
    processes_of,
    report_building,
)
from flows.building.messages import Failure, Start, State, Status, read_message
from flows.building.retry import TransientStageError, is_retryable
from flows.identity.fingerprint import Identity
from flows.identity.manifest import Manifest
from flows.leases import file_lock
from flows.leases.lease import Lease, LeaseHolder, Observer, find_holder
from flows.leases.outage import WaitLog
from flows.render.text import duration
from flows.stages import Stage
from infra.launch.background import run_in_background
from infra.launch.link import Link, LinkLost, open_link
from infra.launch.rendezvous import NODES
from infra.launch.torchrun import StageInterrupted, run_job
from infra.polling import POLL_SECONDS
from nanochat_core.errors import (
    ArtifactError,
    ConfigError,
    NanochatError,
    OutOfMemory,
    StageError,
    StoreError,
)
from nanochat_core.job import Job

_SECONDS_FOR_THE_LOCK = 15.0  # after its grace, in which an earlier attempt saves and ends
_UNREACHABLE = (StoreError, ArtifactError)


def build_share(
    stage: Stage,
    context: BuildContext,
    inputs: Mapping[str, Manifest],
    *,
    node: int,
    force: bool,
    redo: int | None = None,
) -> Built:
    """Build this node's share of a stage. A CPU stage is built by node 0 alone.

    Raises what `build` raises; of these JobFailed (NodeLost), LeaseLost and TransientStageError may
    succeed on a retry.
    """
    if node == 0:
        return build(stage, context, inputs, force=force, redo=redo)
    if nodes_of(stage, context) == 1:
        raise ConfigError(
            f"{stage.name} is built by one machine, this is node {node}",
            hint="start it on node 0 alone",
        )
    with reporting_failure(stage, context):
        lookup = look_up(stage, context, inputs, force=force, redo=redo)
        if lookup.manifest is not None:
            return reuse(context, lookup.manifest)
        follower = _Follower(stage, context, inputs, lookup, node)
        with _locked(follower):
            return follower.join()


def _locked(follower: "_Follower") -> contextlib.AbstractContextManager[None]:
    """Hold the fingerprint's lock in this home. Raises StageError if another process keeps it."""
    # No lease guards the work directory of a follower: two nodes that share a home by mistake would
    # write into the same one.
    context, grace = follower.context, follower.context.placement.resources.grace_seconds
    deadline = time.monotonic() + grace + _SECONDS_FOR_THE_LOCK

    def wait() -> None:
        if time.monotonic() > deadline:
            raise StageError(
                f"node {follower.node} works in {context.placement.home}, as another process does",
                hint="give each node a home of its own: --home, or NANOCHAT_HOME",
            )
        follower.pause()

    return file_lock.hold(file_lock.lock_path(context.work, follower.identity.ref), wait)


@dataclass
class _Follower:
    """A node other than 0, through all attempts at one stage."""

    stage: Stage
    context: BuildContext
    inputs: Mapping[str, Manifest]
    lookup: Lookup
    node: int
    _seen: int = field(default=0, init=False)  # epoch of the last attempt that was joined
    _began: float = field(default_factory=time.time, init=False)
    _observer: Observer = field(default_factory=lambda: Observer(time.monotonic), init=False)

    @property
    def identity(self) -> Identity:
        """Return the identity of what is built."""
        return self.lookup.identity

    def join(self) -> Built:
        """Take part in node 0's attempts until the artifact exists; return it."""
        with self.context.open_cache() as cache:
            # Fetch while node 0 fetches too; but one that listens waits `terms.meet` seconds for us
            # to connect, and then for as long as we fetch.
            with contextlib.suppress(*_UNREACHABLE):
                holder = self._find_holder()
                if holder is None or holder.record.endpoint is None:
                    self._fetch(cache)
            while True:
                found = self._wait()
                if isinstance(found, Manifest):
                    return self._finish(found)
                epoch, link = found
                attempt = _Attempt(self.context, self.identity, link, self.node)
                if attempt.run(partial(self._prepare, cache)):
                    self._seen = epoch
                else:
                    self.pause()

    def _prepare(self, cache: Cache, start: Start) -> tuple[Job, CodeCheck]:
        nodes, processes = self.context.placement.nodes, processes_of(self.stage, self.context)
        if (start.nodes, start.processes) != (nodes, processes):
            raise ConfigError(
                f"node 0 on {start.host} calls {start.nodes} nodes with {start.processes} "
                f"processes, this one was started for {nodes} with {processes}",
                hint=f"give all nodes the same {NODES} and --gpus",
            )
        job = make_job(self.stage, self.context, self.identity, self._fetch(cache))
        resources = replace(job.resources, device_batch_size=start.device_batch_size)
        job = replace(job, resources=resources)
        check = make_check(self.context, self.identity, job, self.lookup.code)
        report_building(self.stage, self.context, job)
        return job, check

    def _fetch(self, cache: Cache) -> dict[str, Path]:
        return fetch_inputs(self.stage, self.context, self.inputs, cache, check=lambda: None)

    def _find_holder(self) -> LeaseHolder | None:
        context, ref = self.context, self.identity.ref
        return find_holder(context.store, ref, ttl=context.terms.ttl, observer=self._observer)

    def pause(self) -> None:
        """Sleep between two polls of the store. Raises StageInterrupted if the run is stopped."""
        self.context.pause(self.stage.name, self.context.terms.poll)

    def _wait(self) -> Manifest | tuple[int, Link]:
        """Wait for the artifact, or for node 0's next lease; return its epoch and a connection.

        Raises TransientStageError if node 0 holds no lease for too long.
        """
        context, terms = self.context, self.context.terms
        heard = time.monotonic()
        # At first node 0 may still be starting elsewhere; later it holds a lease or was lost.
        limit = terms.ttl if self._seen else max(terms.ttl, terms.meet)
        waiting = WaitLog(context.log(self.stage.name, "waiting"), every=terms.report)
        while True:
            holder = None  # also while the store does not answer
            with contextlib.suppress(*_UNREACHABLE):
                if manifest := find_usable(context, self.identity.ref):
                    return manifest
                if holder := self._find_holder():
                    heard = time.monotonic()
                    if link := self._connect(holder.record):
                        return holder.record.epoch, link
            silence = time.monotonic() - heard
            if silence > limit:
                raise TransientStageError(
                    f"{self.identity.ref.name}: node {self.node} heard nothing of node 0 for "
                    f"{duration(silence)}",
                    hint="start node 0 with the same store, then this one again",
                )
            owner = "not started yet"
            if holder is not None:
                owner = f"run {holder.record.run} on host {holder.record.host}"
            waiting.report(owner, f"waiting: node {self.node} for node 0 ({owner})")
            self.pause()

    def _connect(self, lease: Lease) -> Link | None:
        """Connect to a node 0 that listens, unless this node has been in its attempt."""
        if lease.epoch <= self._seen or lease.endpoint is None:
            return None
        return open_link(lease.endpoint, secret=lease.owner, silence=self.context.terms.ttl / 2)

    def _finish(self, manifest: Manifest) -> Built:
        work = file_lock.work_directory(self.context.work, self.identity.ref)
        shutil.rmtree(work, ignore_errors=True)
        if not self._seen:
            return reuse(self.context, manifest)
        return finish(self.context, manifest, began=self._began)


@dataclass
class _Attempt:
    """One attempt of a node other than 0, over its connection to node 0."""

    context: BuildContext
    identity: Identity
    link: Link
    node: int
    _start: Start | None = field(default=None, init=False)  # node 0's last message that was taken
    # From node 0; None: the attempt ends.
    _messages: "Queue[Start | None]" = field(default_factory=Queue[Start | None], init=False)
    # The connection is lost, or the run is stopped.
    _ending: threading.Event = field(default_factory=threading.Event, init=False)

    def run(self, prepare: Callable[[Start], tuple[Job, CodeCheck]]) -> bool:
        """Run this node's ranks, unless node 0 gives the attempt up before they start.

        `prepare` makes the job and fetches its inputs. Every error is reported to node 0. Raises
        StageInterrupted if this node was stopped, and the error of the job or of `prepare` if a
        retry cannot fix it; returns after a retryable one, for the next attempt. False: node 0 did
        not answer, so that another connection may be tried.
        """
        stopped = f"{self.identity.stage} was stopped"
        with run_in_background(self._hear, self._watch), contextlib.closing(self.link):
            try:
                self._take_part(prepare)
            except StageInterrupted:
                if self.context.stop.is_set():
                    self._say("ended", text=stopped)
                    raise
                self._say("ended")  # node 0 ended the attempt
            except NanochatError as error:
                self._say("ended", text=str(error), failure=_kind_of(error), hint=error.hint)
                is_refused = self._start is not None and self._start.refused is not None
                if is_refused or not is_retryable(error):
                    raise
                self.context.log(self.identity.stage)(f"this attempt is over: {error}")
            except Exception as error:  # a bug, or a full disk: a retry would fail in the same way
                self._say("ended", text=f"{type(error).__name__}: {error}", failure="mistake")
                raise
            except BaseException:  # Ctrl-C, a cancelled flow run
                self._say("ended", text=stopped)
                raise
            else:
                self._say("ended")
        return self._start is not None

    def _take_part(self, prepare: Callable[[Start], tuple[Job, CodeCheck]]) -> None:
        self._say("coming")
        self._start = start = self._messages.get()
        if start is None:
            return
        job, check = prepare(start)
        store, log = self.context.store, self.context.log(job.stage)
        try:
            checkpoints.restore_step(store, job, start.step, commit=start.commit, log=log)
        except ArtifactError as error:  # the next attempt's node 0 uploads it again
            raise TransientStageError(str(error), hint=error.hint) from error
        self._say("ready")
        if (start := self._messages.get()) is None:
            return
        self._start = start
        if start.refused:
            hint = "give each machine a number of its own, from 0 on"
            raise TransientStageError(start.refused, hint=hint)
        if not self._ending.is_set():
            self._run(job, start, check)

    def _run(self, job: Job, start: Start, check: CodeCheck) -> None:
        processes = start.processes
        rendezvous = rendezvous_of(start, job, node=self.node)
        # Ranks are numbered by node, with or without torchrun: known before they start.
        first = rendezvous.first_rank(processes)
        append_segment(job, processes=processes * start.nodes, nodes=start.nodes)
        warnings = WaitLog(self.context.log(job.stage, "warning"), every=self.context.terms.report)
        with uploading_shards(
            self.context.store,
            job,
            range(first, first + processes),
            epoch=start.epoch,
            on_shard=lambda shard: self._say("ready", shard=shard),
            on_error=lambda error: warnings.report(
                str(error), f"checkpoint shard not stored: {error}"
            ),
        ):
            run_job(
                job,
                processes=processes,
                on_event=lambda event: self.context.watch(self.identity.stage, event),
                stop=self._ending,
                check=check,
                root=self.context.root,
                rendezvous=rendezvous,
            )

    def _hear(self, over: threading.Event) -> None:
        """Take node 0's messages until the connection ends, which ends this attempt."""
        with contextlib.suppress(LinkLost):
            while True:
                self._messages.put(read_message(Start, self.link.receive()))
        self._ending.set()
        self._messages.put(None)

    def _watch(self, over: threading.Event) -> None:
        """Send signs of life, and end the attempt when the run is stopped."""
        while not over.wait(POLL_SECONDS):
            self.link.send({})
            if self.context.stop.is_set() and not self._ending.is_set():
                self._ending.set()
                self._messages.put(None)

    def _say(self, state: State, **more: Any) -> None:
        """Report this node's status to node 0, with `more` fields of Status."""
        status = Status(node=self.node, host=socket.gethostname(), state=state, **more)
        self.link.send(asdict(status))


def _kind_of(error: NanochatError) -> Failure:
    if isinstance(error, OutOfMemory):
        return "memory"
    return "machine" if is_retryable(error) else "mistake"
