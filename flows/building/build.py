"""Build one stage's artifact, or reuse it: look up, acquire the lease, fetch, run, publish.

A Prefect task of ours calls `build` and does nothing else; this module does not import Prefect.
"""

import shutil
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from flows.artifacts import checkpoints
from flows.artifacts.pins import reserve
from flows.artifacts.publish import find_manifest, publish
from flows.artifacts.revocations import find_revocation, find_revoked
from flows.artifacts.runs import timestamp
from flows.building.code_check import CodeChanged
from flows.building.context import BuildContext, Built
from flows.building.executions import find_commit, read_segments
from flows.building.job import fetch_inputs, make_check, make_job, run_stage
from flows.building.retry import TransientStageError
from flows.identity.fingerprint import Code, Identity
from flows.identity.manifest import Manifest, Provenance, identify_from
from flows.identity.redo import RedoCounter, find_redo, raise_redo
from flows.identity.ref import ArtifactRef
from flows.identity.work import measure_work
from flows.leases import file_lock
from flows.leases.acquire import BuildClaim, acquire
from flows.leases.held_lease import HeldLease
from flows.leases.lease import Lease
from flows.stages import Stage
from infra.launch.torchrun import DISK_FULL, JobFailed, StageInterrupted, disk_full
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, NanochatError
from nanochat_core.runtime.metrics import FILE as METRICS_FILE


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """A stage's identity for given inputs, and its artifact unless that has to be built."""

    identity: Identity
    code: Code  # that the identity was computed from
    manifest: Manifest | None  # reserved by the run's record; None: has to be built


def build(
    stage: Stage,
    context: BuildContext,
    inputs: Mapping[str, Manifest],
    *,
    force: bool,
    redo: int | None = None,
) -> Built:
    """Return the artifact of `stage` made from `inputs`; build it unless the store has it.

    With `force` another one is built, once per run (flows/identity/redo.py). The one that exists
    stays. `redo` as for `look_up`.

    Raises StageError (StageInterrupted, JobFailed, LeaseLost) if the job does not finish; its work
    directory stays, and the next attempt resumes there. Waits while the store does not answer;
    raises StoreError if it refuses.
    """
    with reporting_failure(stage, context):
        while True:
            lookup = look_up(stage, context, inputs, force=force, redo=redo)
            if lookup.manifest is not None:
                return reuse(context, lookup.manifest)
            identity, store = lookup.identity, context.store
            claim = BuildClaim(
                ref=identity.ref,
                lease=Lease.claim(context.run_id),
                lock_path=file_lock.lock_path(context.work, identity.ref),
                device=context.device if stage.compute == "gpu" else None,
                find=partial(find_usable, context, identity.ref),
                wait=context.wait_for_store(stage.name),
            )
            with acquire(claim) as held:
                # It also ends if the lease, if we hold one, is lost.
                check = held.raise_if_lost if isinstance(held, HeldLease) else None
                wait = context.wait_for_store(stage.name, check=check)
                # Look again, under the lease: the owner before us may have published meanwhile.
                if wait(partial(find_manifest, store, identity.ref)) is not None:
                    found = wait(partial(_reserve_existing, context, identity))
                    if found is not None:
                        return reuse(context, found)
                elif isinstance(held, HeldLease):
                    built = _build(stage, context, lookup, inputs, lease=held)
                    # After the manifest is in the store: a crash in between must be able to resume.
                    # Still under the lease, so that they are not those of another builder.
                    wait(partial(checkpoints.forget, store, identity.ref))
                    return built
            # What was found was deleted or revoked meanwhile: look again.


def _build(
    stage: Stage,
    context: BuildContext,
    lookup: Lookup,
    inputs: Mapping[str, Manifest],
    *,
    lease: HeldLease,
) -> Built:
    """Fetch the inputs, run the job, publish its output; return the artifact."""
    began, identity = time.time(), lookup.identity
    wait = context.wait_for_store(stage.name, check=lease.raise_if_lost)
    with context.open_cache() as cache:
        files = fetch_inputs(stage, context, inputs, cache, check=lease.raise_if_lost)
        job = make_job(stage, context, identity, files)
        check = make_check(context, identity, job, lookup.code)
        try:
            result = run_stage(stage, context, job, lease, check)
            check.check_complete()
        except CodeChanged:  # other code wrote the checkpoints: they belong to no fingerprint
            shutil.rmtree(job.directory, ignore_errors=True)
            raise
    logs = [job.events, job.directory / METRICS_FILE, job.directory / "worker.log"]
    published = publish(
        context.store,
        identity,
        job.output,
        logs=[log for log in logs if log.exists() and log.stat().st_size],
        inputs={name: inputs[name] for name in job.inputs},
        provenance=Provenance(
            run=context.run_id,
            owner=lease.record.owner,
            epoch=lease.record.epoch,
            created=timestamp(time.time()),
            git_commit=find_commit(context.root),
            metrics=result.metrics,
            versions=result.versions,
            segments=tuple(read_segments(job)),
            work=measure_work(stage, context.run),
        ),
        check_lease=lease.check,
        retry=wait,
    )
    # Either another builder was first with other contents, or the recipe's artifact before this one
    # has others. Both show that the stage is not deterministic.
    differs = published.divergence or (published.manifest.divergences or (None,))[0]
    if differs is not None:
        context.log(identity.stage, "warning")(
            f"{identity.stage} was built before with another result: {context.store.url}/{differs}"
        )
    wait(lambda: context.record(identity.ref))
    # Last: until the manifest is stored, a retry publishes the output from this directory.
    shutil.rmtree(job.directory, ignore_errors=True)
    return finish(context, published.manifest, began=began)


@contextmanager
def reporting_failure(stage: Stage, context: BuildContext) -> Generator[None]:
    """Report an error that ends the block as an event, then let it raise.

    A full disk, of work directory or cache, becomes a StageError.
    """
    try:
        try:
            yield
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise disk_full(stage.name, error.filename or context.work) from error
    except StageInterrupted:
        context.watch(stage.name, {"kind": "interrupted"})
        raise
    except NanochatError as error:
        log_tail = error.log_tail if isinstance(error, JobFailed) else ""
        event = {"error": str(error), "hint": error.hint, "log_tail": log_tail}
        context.watch(stage.name, {"kind": "failed", **event})
        raise


def look_up(
    stage: Stage,
    context: BuildContext,
    inputs: Mapping[str, Manifest],
    *,
    force: bool,
    redo: int | None = None,
) -> Lookup:
    """Look up the artifact of `stage` made from `inputs`, which is the first thing `build` does.

    `redo` is the number that was requested; None means the one that the recipe's counter has.
    Raises TransientStageError if that one was revoked meanwhile: its caller asks for another.
    """
    # The files are read now, not at the start of the run: they are what the job will import.
    code = Code(context.root, cache=context.work / "code.json")
    recipe = identify_from(stage, context.run, inputs, code=code)
    wait = context.wait_for_store(stage.name)
    if redo is None:
        identity, found = wait(lambda: _choose(context, recipe, force=force))
    else:
        identity = recipe.redone(redo)
        found = wait(lambda: find_manifest(context.store, identity.ref))
        if found is not None and wait(lambda: find_revoked(context.store, found)) is not None:
            raise TransientStageError(f"{found.name} was revoked meanwhile")
    reserved = wait(lambda: _reserve_existing(context, identity)) if found is not None else None
    return Lookup(identity=identity, code=code, manifest=reserved)


def _choose(
    context: BuildContext, recipe: Identity, *, force: bool
) -> tuple[Identity, Manifest | None]:
    """Return the artifact of a recipe to use, and its manifest if it exists.

    Asks for another one if it was revoked, and once per run with `force`, which counts as asked
    where nothing was begun.
    """
    store, run = context.store, context.run_id
    while True:
        redo = find_redo(store, recipe.ref)
        identity = recipe.redone(redo.number)
        found = find_manifest(store, identity.ref)
        if found is not None:
            is_revoked = find_revoked(store, found) is not None
            is_old = found.provenance.run != run
        else:  # a revocation may have come without its artifact, from another store
            is_revoked = find_revocation(store, identity.ref) is not None
            is_old = any(True for _ in store.list(f"{identity.ref.prefix}/"))
        if not is_revoked and (run in redo.runs or not force):
            return identity, found
        asked = RedoCounter(
            number=redo.number + (is_old or is_revoked),
            before=redo.before if found is None else redo.number,
            runs=(*redo.runs, run),
        )
        # Read again afterwards: another run may have asked at the same moment.
        raise_redo(store, recipe.ref, redo, asked)


def find_usable(context: BuildContext, ref: ArtifactRef) -> Manifest | None:
    """Return the artifact. None if it does not exist or was revoked."""
    found = find_manifest(context.store, ref)
    return None if found is None or find_revoked(context.store, found) is not None else found


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
                hint="run the same command again: it looks for its artifacts again",
            )


def _reserve(context: BuildContext, ref: ArtifactRef) -> None:
    """Record in the run that it uses an artifact, then wait until no collection is running."""
    reserve(
        context.store,
        lambda: context.record(ref),
        log=context.log(ref.stage, "waiting"),
        pause=partial(context.pause, ref.stage),
    )


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


def uri_of(store: Store, manifest: Manifest) -> str:
    """Return an artifact's URI: its prefix in the store."""
    return f"{store.url}/{manifest.ref.prefix}"
