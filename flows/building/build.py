"""Build one stage's artifact, or reuse it: look up, acquire the lease, fetch, run, publish.

A Prefect task of ours calls `build` and does nothing else; this module does not import Prefect.
"""

import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from flows.artifacts import checkpoints
from flows.artifacts.pins import reserve
from flows.artifacts.publish import Published, find_manifest, publish
from flows.artifacts.revocations import find_revoked
from flows.artifacts.runs import timestamp
from flows.building.code_check import CodeChanged
from flows.building.context import BuildContext, Built
from flows.building.executions import find_commit, read_segments
from flows.building.job import fetch_inputs, make_check, make_job, run_stage, work_of
from flows.identity.fingerprint import Code, Identity
from flows.identity.manifest import Manifest, Provenance, identify_from
from flows.identity.rebuilds import NONE, find_rebuild_mark, is_rebuilt, mark_rebuild, open_work
from flows.identity.ref import ArtifactRef
from flows.identity.work import measure_work
from flows.leases import file_lock
from flows.leases.acquire import BuildClaim, acquire
from flows.leases.held_lease import HeldLease
from flows.leases.lease import Claimant
from flows.leases.outage import StoreWait
from flows.stages import Stage
from infra.launch.torchrun import DISK_FULL, JobFailed, StageInterrupted, disk_full
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, NanochatError
from nanochat_core.job import Job, Result
from nanochat_core.runtime.metrics import FILE as METRICS_FILE


def build(
    stage: Stage, context: BuildContext, inputs: Mapping[str, Manifest], *, force: bool
) -> Built:
    """Return the artifact of `stage` made from `inputs`; build it unless the store has it.

    With `force` an existing one is built again, unless this very run built it. It stays in place
    until the new one is stored, also if that never happens.

    Raises StageError (StageInterrupted, JobFailed, LeaseLost) if the job does not finish; its work
    directory stays, and the next attempt resumes there. Waits while the store does not answer;
    raises StoreError if it refuses.
    """
    with reporting_failure(stage, context):
        return _reuse_or_build(stage, context, inputs, force=force)


@contextmanager
def reporting_failure(stage: Stage, context: BuildContext) -> Generator[None]:
    """Report an error that ends the block as an event, then let it raise.

    A full disk, of work directory or cache, becomes a StageError.
    """
    try:
        with _disk_full_in_a_line(stage, context):
            yield
    except StageInterrupted:
        context.watch(stage.name, {"kind": "interrupted"})
        raise
    except NanochatError as error:
        log_tail = error.log_tail if isinstance(error, JobFailed) else ""
        event = {"error": str(error), "hint": error.hint, "log_tail": log_tail}
        context.watch(stage.name, {"kind": "failed", **event})
        raise


@contextmanager
def _disk_full_in_a_line(stage: Stage, context: BuildContext) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise disk_full(stage.name, error.filename or context.work) from error


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """A stage's identity for given inputs, and its artifact unless that has to be built."""

    identity: Identity
    code: Code  # that the identity was computed from
    redo: bool  # build even if the artifact exists
    manifest: Manifest | None  # reserved by the run's record; None: has to be built


def look_up(
    stage: Stage, context: BuildContext, inputs: Mapping[str, Manifest], *, force: bool
) -> Lookup:
    """Look up the artifact of `stage` made from `inputs`, which is the first thing `build` does."""
    # The files are read now, not at the start of the run: they are what the job will import.
    code = Code(context.root, cache=context.work / "code.json")
    identity = identify_from(stage, context.run, inputs, code=code)
    wait = context.wait_for_store(stage.name)
    found = wait(lambda: find_result(context, identity.ref, force=force))
    reserved = wait(lambda: _reserve_existing(context, identity)) if found is not None else None
    return Lookup(identity=identity, code=code, redo=force and found is None, manifest=reserved)


def _reuse_or_build(
    stage: Stage, context: BuildContext, inputs: Mapping[str, Manifest], *, force: bool
) -> Built:
    lookup = look_up(stage, context, inputs, force=force)
    if lookup.manifest is not None:
        return reuse(context, lookup.manifest)
    identity, redo = lookup.identity, lookup.redo
    while True:
        with acquire(_make_claim(stage, context, identity, redo=redo)) as held:
            wait = _wait_under(context, stage, held)
            # Look again, under the lease: the owner before us may have published meanwhile.
            found, is_wanted = wait(lambda: _find_wanted(context, identity.ref, redo=redo))
            if is_wanted and (reserved := wait(lambda: _reserve_existing(context, identity))):
                return reuse(context, reserved)
            # Another process built it, so we hold no lease, but a garbage collection deleted it
            # before our record could reserve it: claim again.
            if isinstance(held, Manifest):
                continue
            wait(partial(_begin, context, identity, found, redo=redo, check_lease=held.check))
            built = _build(stage, context, lookup, inputs, replaces=found, lease=held)
            # Checkpoints go after the manifest is in the store: a crash in between must be able to
            # resume. Still under the lease, so that they are not those of another builder.
            wait(lambda: checkpoints.forget(context.store, identity.ref))
            return built


def _wait_under(context: BuildContext, stage: Stage, held: HeldLease | Manifest) -> StoreWait:
    """Return a wait for the store that also ends if the lease, if we hold one, is lost."""
    if isinstance(held, Manifest):
        return context.wait_for_store(stage.name)
    return context.wait_for_store(stage.name, check=held.raise_if_lost)


def _find_wanted(
    context: BuildContext, ref: ArtifactRef, *, redo: bool
) -> tuple[Manifest | None, bool]:
    """Return the artifact, if it exists, and whether it makes a build unnecessary."""
    # By one read: an artifact that another process publishes after it is not one to replace.
    found = find_manifest(context.store, ref)
    if found is None or redo or find_revoked(context.store, found) is not None:
        return found, False
    return found, not is_rebuilt(context.store, found)


def find_usable(context: BuildContext, ref: ArtifactRef) -> Manifest | None:
    """Return the artifact. None if it does not exist, was revoked, or its rebuild has begun."""
    found, is_wanted = _find_wanted(context, ref, redo=False)
    return found if is_wanted else None


def find_result(context: BuildContext, ref: ArtifactRef, *, force: bool) -> Manifest | None:
    """Return the artifact that makes a build unnecessary: with `force`, one that this run built."""
    # The artifact that a forced build replaces exists all the time. A retry of a forced run finds
    # what its earlier attempt built: that is the rebuild.
    found = find_usable(context, ref)
    is_old = force and found is not None and found.provenance.run != context.run_id
    return None if is_old else found


def _reserve_existing(context: BuildContext, identity: Identity) -> Manifest | None:
    """Reserve the artifact for this run and return it. None if it is gone or was revoked."""
    # Record first, look second: a collection either sees the record, or we see the deletion.
    _reserve(context, identity.ref)
    return find_usable(context, identity.ref)


def reserve_found(context: BuildContext, manifests: Iterable[Manifest]) -> None:
    """Record that the run uses these artifacts, which the caller found before, revoked or not.

    Raises ArtifactError if one was collected before it was recorded, StageInterrupted if the run is
    stopped while this waits for a collection to end.
    """
    for manifest in manifests:
        _reserve(context, manifest.ref)
        if find_manifest(context.store, manifest.ref) is None:
            raise ArtifactError(
                f"{manifest.name} was deleted from {context.store.url} by a garbage collection "
                f"before run {context.run_id} had recorded that it uses it",
                hint="run the same command again: it looks for its artifacts anew",
            )


def _reserve(context: BuildContext, ref: ArtifactRef) -> None:
    """Record in the run that it uses an artifact, then wait until no collection is running."""
    reserve(
        context.store,
        lambda: context.record(ref),
        log=context.log(ref.stage, "waiting"),
        pause=partial(context.pause, ref.stage),
    )


def _make_claim(
    stage: Stage, context: BuildContext, identity: Identity, *, redo: bool
) -> BuildClaim:
    """Return the claim to build: lock, device, lease, and how to find the finished artifact."""
    return BuildClaim(
        ref=identity.ref,
        store=context.store,
        lock_path=file_lock.lock_path(context.work, identity.ref),
        device=context.device if stage.compute == "gpu" else None,
        claimant=Claimant(
            owner=uuid.uuid4().hex,  # new for each attempt: a lease of ours before is not ours now
            run=context.run_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            home=file_lock.home_id(context.placement.home),
            since=timestamp(time.time()),
        ),
        terms=context.terms,
        stop=context.stop,
        # With `redo` the artifact that exists is the one to replace: it must not end the wait.
        find=lambda: None if redo else find_usable(context, identity.ref),
        log=context.log(stage.name, "waiting"),
    )


def _begin(
    context: BuildContext,
    identity: Identity,
    replaces: Manifest | None,
    *,
    redo: bool,
    check_lease: Callable[[], None],
) -> None:
    """Open the work directory of a build, which replaces an artifact if there is one. Idempotent.

    A rebuild is marked once, and its earlier jobs' checkpoints are void from then on: all runs, on
    any machine, resume what has been saved since. A run with `redo` begins its own.
    """
    mark = find_rebuild_mark(context.store, identity.ref)
    has_begun = (
        mark is not None
        and (replaces is None or mark.is_of(replaces))
        and (not redo or mark.run == context.run_id)
    )
    if (redo or replaces is not None) and not has_begun:
        check_lease()
        checkpoints.forget(context.store, identity.ref)  # first: it would delete the mark too
        mark = mark_rebuild(context.store, identity.ref, run=context.run_id, replaces=replaces)
    open_work(work_of(context, identity), mark.id if mark else NONE)


def uri_of(store: Store, manifest: Manifest) -> str:
    """Return an artifact's URI: its prefix in the store."""
    return f"{store.url}/{manifest.ref.prefix}"


def reuse(context: BuildContext, manifest: Manifest) -> Built:
    """Return an artifact that exists as Built, after a `cached` event."""
    uri = uri_of(context.store, manifest)
    context.watch(manifest.stage, {"kind": "cached", "uri": uri})
    return Built(manifest=manifest, uri=uri, cached=True)


def finish(context: BuildContext, manifest: Manifest, *, began: float) -> Built:
    """Return a new artifact as Built, after a `finished` event; `began` is in Unix seconds."""
    uri, metrics = uri_of(context.store, manifest), manifest.provenance.metrics
    event = {"kind": "finished", "uri": uri, "seconds": time.time() - began, "metrics": metrics}
    context.watch(manifest.stage, event)
    return Built(manifest=manifest, uri=uri, cached=False)


def _build(
    stage: Stage,
    context: BuildContext,
    lookup: Lookup,
    inputs: Mapping[str, Manifest],
    *,
    replaces: Manifest | None,
    lease: HeldLease,
) -> Built:
    began = time.time()
    identity = lookup.identity
    wait = _wait_under(context, stage, lease)
    with context.open_cache() as cache:
        files = fetch_inputs(stage, context, inputs, cache, check=lease.raise_if_lost)
        job = make_job(stage, context, identity, files)
        check = make_check(context, identity, job, lookup.code)
        check.discard_foreign_state()
        try:
            result = run_stage(stage, context, job, lease, check)
            check.check_complete()
        except CodeChanged:  # other code wrote the checkpoints: they belong to no fingerprint
            shutil.rmtree(job.directory, ignore_errors=True)
            raise
    published = _publish(stage, context, identity, job, inputs, result, replaces, lease, wait)
    wait(lambda: context.record(identity.ref))
    # Last: until the manifest is stored, a retry publishes the output from this directory.
    shutil.rmtree(job.directory, ignore_errors=True)
    return finish(context, published.manifest, began=began)


def _publish(
    stage: Stage,
    context: BuildContext,
    identity: Identity,
    job: Job,
    inputs: Mapping[str, Manifest],
    result: Result,
    replaces: Manifest | None,
    lease: HeldLease,
    wait: StoreWait,
) -> Published:
    logs = [job.events, job.directory / METRICS_FILE, job.directory / "worker.log"]
    published = publish(
        context.store,
        identity,
        job.output,
        logs=[log for log in logs if log.exists() and log.stat().st_size],
        inputs={name: inputs[name] for name in job.inputs},
        provenance=Provenance(
            run=context.run_id,
            owner=lease.owner,
            epoch=lease.fencing_token,
            created=timestamp(time.time()),
            git_commit=find_commit(context.root),
            metrics=result.metrics,
            versions=result.versions,
            segments=tuple(read_segments(job)),
            work=measure_work(stage, context.run),
        ),
        check_lease=lease.check,
        replaces=replaces,
        retry=wait,
    )
    # Either another builder was first with other contents, or an earlier build of this fingerprint,
    # since superseded, had other contents. Both show that the stage is not deterministic.
    differs = published.divergence or (published.manifest.divergences or (None,))[0]
    if differs is not None:
        context.log(identity.stage, "warning")(
            f"{identity.stage} was built before with another result: {context.store.url}/{differs}"
        )
    return published
