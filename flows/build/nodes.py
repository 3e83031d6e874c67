"""Build one stage on several machines (nodes), each with its own disk.

Node 0 builds the stage as one machine would (flows/build/build.py, flows/build/coordinator.py).
The others fetch the inputs, wait for node 0's start message, fetch the checkpoint that it names,
run their ranks, and upload what these save. They hold no lease and publish nothing. If an attempt
ends without the artifact, they wait for the next start message (flows/build/follower.py).
"""

import contextlib
import shutil
import time
from collections.abc import Generator, Mapping
from functools import partial
from pathlib import Path

from flows.artifacts.cache import Cache
from flows.build.build import Lookup, build, find_usable, look_up, reporting_failure, reuse, uri_of
from flows.build.code_check import CodeCheck
from flows.build.context import BuildContext, Built
from flows.build.follower import FollowerAttempt
from flows.build.job import (
    fetch_inputs,
    make_check,
    make_job,
    nodes_of,
    processes_of,
    report_building,
    work_of,
)
from flows.build.messages import MessagePrefix, StartMessage, find_start
from flows.build.retry import TransientStageError
from flows.identity.manifest import Manifest
from flows.leases import file_lock
from flows.leases.lease import LeaseHolder
from flows.render.text import duration
from flows.stages import Stage
from infra.launch.torchrun import StageInterrupted
from nanochat_core.errors import ArtifactError, ConfigError, StageError, StoreError
from nanochat_core.job import Job

_SECONDS_FOR_THE_LOCK = 40.0  # an earlier attempt that was sent SIGTERM saves and ends in less
_UNREACHABLE = (StoreError, ArtifactError)


def build_share(
    stage: Stage, context: BuildContext, inputs: Mapping[str, Manifest], *, node: int, force: bool
) -> Built:
    """Build this node's share of a stage. A CPU stage is built by node 0 alone.

    Raises what `build` raises; of these JobFailed (NodeLost), LeaseLost and TransientStageError may
    succeed on a retry.
    """
    nodes = context.placement.nodes
    if not 0 <= node < nodes:
        raise ConfigError(
            f"node {node} is not one of {nodes} nodes", hint=f"they are numbered 0 to {nodes - 1}"
        )
    if node == 0:
        return build(stage, context, inputs, force=force)
    if nodes_of(stage, context) == 1:
        raise ConfigError(
            f"{stage.name} is built by one machine, this is node {node}",
            hint="start it on node 0 alone",
        )
    with reporting_failure(stage, context):
        lookup = look_up(stage, context, inputs, force=force)
        if lookup.manifest is not None:
            return reuse(context, lookup.manifest)
        follower = _Follower(stage, context, inputs, lookup, node=node)
        with _locked(follower):
            return follower.join()


@contextlib.contextmanager
def _locked(follower: "_Follower") -> Generator[None]:
    """Hold the fingerprint's lock in this home. Raises StageError if another process keeps it."""
    # No lease guards the work directory of a follower: two nodes that share a home by mistake would
    # write into the same one.
    context, identity = follower.context, follower.identity
    path = file_lock.lock_path(context.work, identity.ref)
    deadline = time.monotonic() + _SECONDS_FOR_THE_LOCK
    while True:
        with file_lock.try_hold(path) as is_held:
            if is_held:
                yield
                return
            owner = file_lock.find_owner(path)
        if time.monotonic() > deadline:
            raise StageError(
                f"node {follower.node} works in {context.placement.home}, as {owner} does",
                hint="give each node a home of its own: --home, or NANOCHAT_HOME",
            )
        follower.pause()


class _Follower:
    """A node other than 0, through all attempts at one stage."""

    def __init__(
        self,
        stage: Stage,
        context: BuildContext,
        inputs: Mapping[str, Manifest],
        lookup: Lookup,
        *,
        node: int,
    ) -> None:
        self.context = context
        self.identity = lookup.identity
        self.node = node
        self._stage = stage
        self._inputs = inputs
        self._code = lookup.code
        self._redo = lookup.redo
        self._place = MessagePrefix(store=context.store, ref=self.identity.ref)
        self._seen = 0  # epoch of the last start message that was followed
        self._began = time.time()

    def join(self) -> Built:
        """Follow node 0's start messages until the artifact exists; return it."""
        with self.context.open_cache() as cache:
            # Fetch while node 0 fetches too. If the start message exists, `_prepare` fetches, after
            # this node has reported that it joined: node 0 waits `terms.meet` seconds for that.
            if not self._is_called():
                self._fetch(cache)
            while True:
                found = self._wait()
                if isinstance(found, Manifest):
                    return self._finish(found)
                self._seen = found.epoch
                attempt = FollowerAttempt(self.context, self._place, found, node=self.node)
                attempt.run(partial(self._prepare, found, cache))

    def _prepare(self, call: StartMessage, cache: Cache) -> tuple[Job, CodeCheck]:
        self._check(call)
        job = make_job(self._stage, self.context, self.identity, self._fetch(cache))
        check = make_check(self.context, self.identity, job, self._code)
        check.discard_foreign_state()
        report_building(self._stage, self.context, job)
        return job, check

    def _fetch(self, cache: Cache) -> dict[str, Path]:
        return fetch_inputs(self._stage, self.context, self._inputs, cache, check=lambda: None)

    def _is_called(self) -> bool:
        with contextlib.suppress(*_UNREACHABLE):
            return find_start(self._place, ttl=self.context.terms.ttl)[0] is not None
        return False

    def pause(self) -> None:
        """Sleep between two polls of the store. Raises StageInterrupted if the run is stopped."""
        if self.context.stop.wait(self.context.terms.look):
            raise StageInterrupted(f"{self._stage.name}: the run is being stopped")

    def _wait(self) -> Manifest | StartMessage:
        """Wait for the artifact or a new start message, and return it.

        Raises TransientStageError if node 0 holds no lease for too long.
        """
        terms = self.context.terms
        heard = time.monotonic()
        # At first node 0 may still be starting elsewhere; later it holds a lease or was lost.
        limit = terms.ttl if self._seen else max(terms.ttl, terms.meet)
        next_line = 0.0
        while True:
            try:
                if manifest := self._find():
                    return manifest
                call, holder = find_start(self._place, ttl=terms.ttl)
                if holder is not None:
                    heard = time.monotonic()
                if call is not None and call.epoch > self._seen:
                    return call
            except _UNREACHABLE:
                holder = None
            silence = time.monotonic() - heard
            if silence > limit:
                raise TransientStageError(
                    f"{self._place.ref.name}: node {self.node} heard nothing of node 0 for "
                    f"{duration(silence)}",
                    hint="start node 0 with the same store, then this one again",
                )
            if time.monotonic() >= next_line:
                next_line = time.monotonic() + terms.say
                self._report_waiting(holder)
            self.pause()

    def _report_waiting(self, holder: LeaseHolder | None) -> None:
        owner = f"run {holder.record.run} on host {holder.host}" if holder else "not started yet"
        text = f"waiting: node {self.node} for node 0 ({owner})"
        self.context.watch(self._stage.name, {"kind": "waiting", "text": text})

    def _find(self) -> Manifest | None:
        found = find_usable(self.context, self.identity)
        # With --force the artifact to wait for is the one of this run, not its predecessor.
        is_old = self._redo and found is not None and found.provenance.run != self.context.run_id
        return None if is_old else found

    def _check(self, call: StartMessage) -> None:
        """Raise ConfigError if node 0 was started for another number of nodes or processes."""
        nodes, processes = self.context.placement.nodes, processes_of(self._stage, self.context)
        if (call.nodes, call.processes) != (nodes, processes):
            raise ConfigError(
                f"node 0 on {call.host} calls {call.nodes} nodes with {call.processes} processes, "
                f"this one was started for {nodes} with {processes}",
                hint="give all nodes the same --nodes and --gpus",
            )

    def _finish(self, manifest: Manifest) -> Built:
        shutil.rmtree(work_of(self.context, self.identity), ignore_errors=True)
        if not self._seen:
            return reuse(self.context, manifest)
        uri = uri_of(self.context.store, manifest)
        event = {
            "kind": "finished",
            "uri": uri,
            "seconds": time.time() - self._began,
            "metrics": manifest.provenance.metrics,
        }
        self.context.watch(self._stage.name, event)
        return Built(manifest=manifest, uri=uri, cached=False)
