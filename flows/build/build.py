"""Builds one stage's artifact, or finds that it exists: reuse, lease, fetch, run, publish.

This is the whole of what a Prefect task of ours does, and it knows nothing of Prefect.
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
from flows.artifacts.publish import Published, find_manifest, publish, supersede
from flows.artifacts.revocations import find_revoked
from flows.artifacts.runs import timestamp
from flows.build.code_check import CodeChanged
from flows.build.context import BuildContext, Built, Watch
from flows.build.executions import find_commit, read_segments
from flows.build.job import fetch_inputs, make_check, make_job, run_stage, work_of
from flows.identity.fingerprint import Code, Identity
from flows.identity.manifest import Manifest, Provenance, identify_from
from flows.identity.rebuilds import NONE, find_rebuild_mark, mark_rebuild, open_work
from flows.leases import file_lock
from flows.leases.acquire import BuildClaim, acquire
from flows.leases.held_lease import HeldLease
from flows.leases.lease import Claimant
from flows.leases.outage import StoreWait
from flows.stages import Stage
from infra.launch.torchrun import JobFailed, StageInterrupted
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, NanochatError
from nanochat_core.job import Job, Result
from nanochat_core.runtime.metrics import FILE as METRICS_FILE

__all__ = [
    "BuildContext",
    "Built",
    "Lookup",
    "Watch",
    "build",
    "find_usable",
    "look_up",
    "reporting_failure",
    "reserve_found",
    "reuse",
    "uri_of",
]


def build(
    stage: Stage, site: BuildContext, inputs: Mapping[str, Manifest], *, force: bool
) -> Built:
    """The artifact of `stage` made from `inputs`, built unless the store has it.

    With `force` an existing one is put aside and built again, unless this very run built it.

    Raises StageError (StageInterrupted, JobFailed, LeaseLost) when the job does not finish; its
    work directory stays, and the next attempt goes on there. Waits while the store does not
    answer; raises StoreError when it refuses.
    """
    with reporting_failure(stage, site):
        return _reuse_or_build(stage, site, inputs, force=force)


@contextmanager
def reporting_failure(stage: Stage, site: BuildContext) -> Generator[None]:
    """Tell when the block ends with an error."""
    try:
        yield
    except StageInterrupted:
        site.watch(stage.name, {"kind": "interrupted"})
        raise
    except NanochatError as error:
        log_tail = error.log_tail if isinstance(error, JobFailed) else ""
        event = {"error": str(error), "hint": error.hint, "log_tail": log_tail}
        site.watch(stage.name, {"kind": "failed", **event})
        raise


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """What a stage makes of its inputs, and its artifact if that need not be built."""

    identity: Identity
    code: Code  # that it was computed from
    redo: bool  # even if it is there
    manifest: Manifest | None  # kept by the run's record


def look_up(
    stage: Stage, site: BuildContext, inputs: Mapping[str, Manifest], *, force: bool
) -> Lookup:
    """Look whether the artifact of `stage` made from `inputs` is there, as `build` does first."""
    # The files are read now, not at the start of the run: they are what the job will import.
    code = Code(site.root, cache=site.work / "code.json")
    identity = identify_from(stage, site.run, inputs, code=code)
    wait = site.wait_for_store(stage.name)
    found = wait(lambda: find_usable(site, identity))
    redo = force and (found is None or found.provenance.run != site.run_id)
    kept = (
        wait(lambda: _reserve_existing(site, identity)) if found is not None and not redo else None
    )
    return Lookup(identity=identity, code=code, redo=redo, manifest=kept)


def _reuse_or_build(
    stage: Stage, site: BuildContext, inputs: Mapping[str, Manifest], *, force: bool
) -> Built:
    sought = look_up(stage, site, inputs, force=force)
    if sought.manifest is not None:
        return reuse(site, sought.manifest)
    identity, redo = sought.identity, sought.redo
    while True:
        with acquire(_turn(stage, site, identity, redo=redo)) as turn:
            wait = _wait_under(site, stage, turn)
            found, unwanted = wait(lambda: _find_unwanted(site, identity, redo=redo))
            if (
                found is not None
                and not unwanted
                and (kept := wait(lambda: _reserve_existing(site, identity)))
            ):
                return reuse(site, kept)  # built by the owner of the lease before
            if isinstance(turn, Manifest):  # collected while we waited for the collection's end
                continue
            wait(partial(_put_aside, site, identity, found, redo=redo, fence=turn.check))
            built = _build(stage, site, sought, inputs, lease=turn)
            wait(lambda: checkpoints.forget(site.store, stage.name, identity.fingerprint))
            return built


def _wait_under(site: BuildContext, stage: Stage, turn: HeldLease | Manifest) -> StoreWait:
    """Wait for the store for as long as the lease, if it is one, is not known to be lost."""
    if isinstance(turn, Manifest):
        return site.wait_for_store(stage.name)
    return site.wait_for_store(stage.name, check=turn.raise_if_lost)


def _find_unwanted(
    site: BuildContext, identity: Identity, *, redo: bool
) -> tuple[Manifest | None, bool]:
    """Return the artifact, if it exists, and whether it is to be built all the same."""
    found = find_manifest(site.store, identity.stage, identity.fingerprint)
    is_revoked = found is not None and find_revoked(site.store, found) is not None
    return found, redo or is_revoked


def find_usable(site: BuildContext, identity: Identity) -> Manifest | None:
    """The artifact; one that was revoked counts as not there."""
    manifest = find_manifest(site.store, identity.stage, identity.fingerprint)
    if manifest is None or find_revoked(site.store, manifest) is not None:
        return None
    return manifest


def _reserve_existing(site: BuildContext, identity: Identity) -> Manifest | None:
    """The artifact, which the run's record keeps from being collected; None when it is gone."""
    _reserve(site, identity.stage, identity.fingerprint)
    return find_usable(site, identity)


def reserve_found(site: BuildContext, manifests: Iterable[Manifest]) -> None:
    """Record that the run uses these artifacts, which were looked up before, revoked or not.

    Raises ArtifactError if one was collected before it was recorded, StageInterrupted if the run is
    stopped while a collection is waited for.
    """
    for manifest in manifests:
        stage, fingerprint = manifest.stage, manifest.fingerprint
        _reserve(site, stage, fingerprint)
        if find_manifest(site.store, stage, fingerprint) is None:
            raise ArtifactError(
                f"{manifest.name} was deleted from {site.store.url} by a garbage collection before "
                f"run {site.run_id} had recorded that it uses it",
                hint="run the same command again: it looks for its artifacts anew",
            )


def _reserve(site: BuildContext, stage: str, fingerprint: str) -> None:
    """Record in the run that it uses an artifact, in time for every collection."""

    def pause(seconds: float) -> None:
        if site.stop.wait(seconds):
            raise StageInterrupted(f"{stage} was not started: the run is being stopped")

    reserve(
        site.store,
        lambda: site.record(stage, fingerprint),
        tell=lambda text: site.watch(stage, {"kind": "waiting", "text": text}),
        pause=pause,
    )


def _turn(stage: Stage, site: BuildContext, identity: Identity, *, redo: bool) -> BuildClaim:
    """What is waited for. An artifact that is to be built again does not end the waiting."""
    return BuildClaim(
        stage=stage.name,
        fingerprint=identity.fingerprint,
        store=site.store,
        lock_path=file_lock.lock_path(site.work, stage.name, identity.fingerprint),
        device=site.device if stage.compute == "gpu" else None,
        claim=Claimant(
            owner=uuid.uuid4().hex,
            run=site.run_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            home=file_lock.home_id(site.placement.home),
            since=timestamp(time.time()),
        ),
        terms=site.terms,
        stop=site.stop,
        find=lambda: None if redo else find_usable(site, identity),
        tell=lambda text: site.watch(stage.name, {"kind": "waiting", "text": text}),
    )


def _put_aside(
    site: BuildContext,
    identity: Identity,
    unwanted: Manifest | None,
    *,
    redo: bool,
    fence: Callable[[], None],
) -> None:
    """Make room for another artifact when there is one that is not wanted. Safe to repeat.

    A run begins a rebuild once: its later attempts, on whichever machine, resume what the first of
    them saved. Everything older is void: the mark comes before the artifact is put aside.
    """
    stage, fingerprint = identity.stage, identity.fingerprint
    mark = find_rebuild_mark(site.store, stage, fingerprint)
    has_begun = redo and mark is not None and mark.run == site.run_id
    if (redo or unwanted is not None) and not has_begun:
        fence()
        checkpoints.forget(site.store, stage, fingerprint)
        mark = mark_rebuild(site.store, stage, fingerprint, run=site.run_id)
    if unwanted is not None:
        supersede(site.store, unwanted, fence=fence)
    open_work(work_of(site, identity), mark.id if mark else NONE)


def uri_of(store: Store, manifest: Manifest) -> str:
    """Where an artifact is."""
    return f"{store.url}/{manifest.stage}/{manifest.fingerprint}"


def reuse(site: BuildContext, manifest: Manifest) -> Built:
    """An artifact that is there. Says so."""
    uri = uri_of(site.store, manifest)
    site.watch(manifest.stage, {"kind": "cached", "uri": uri})
    return Built(manifest=manifest, uri=uri, cached=True)


def _build(
    stage: Stage,
    site: BuildContext,
    sought: Lookup,
    inputs: Mapping[str, Manifest],
    *,
    lease: HeldLease,
) -> Built:
    started = time.time()
    identity = sought.identity
    wait = _wait_under(site, stage, lease)
    with site.open_cache() as cache:
        files = fetch_inputs(stage, site, inputs, cache, check=lease.raise_if_lost)
        job = make_job(stage, site, identity, files)
        check = make_check(site, identity, job, sought.code)
        check.discard_foreign_state()
        try:
            result = run_stage(stage, site, job, lease, check)
            check.check_complete()
        except CodeChanged:  # what it saved is not this fingerprint's
            shutil.rmtree(job.directory, ignore_errors=True)
            raise
    published = _publish(site, identity, job, inputs, result, lease, wait)
    wait(lambda: site.record(stage.name, identity.fingerprint))
    shutil.rmtree(job.directory, ignore_errors=True)
    uri = uri_of(site.store, published.manifest)
    site.watch(
        stage.name,
        {
            "kind": "finished",
            "uri": uri,
            "seconds": time.time() - started,
            "metrics": result.metrics,
        },
    )
    return Built(manifest=published.manifest, uri=uri, cached=False)


def _publish(
    site: BuildContext,
    identity: Identity,
    job: Job,
    inputs: Mapping[str, Manifest],
    result: Result,
    lease: HeldLease,
    wait: StoreWait,
) -> Published:
    logs = [job.events, job.directory / METRICS_FILE, job.directory / "worker.log"]
    published = publish(
        site.store,
        identity,
        job.output,
        logs=[log for log in logs if log.exists() and log.stat().st_size],
        inputs={name: inputs[name] for name in job.inputs},
        provenance=Provenance(
            run=site.run_id,
            owner=lease.owner,
            epoch=lease.epoch,
            created=timestamp(time.time()),
            git_commit=find_commit(site.root),
            metrics=result.metrics,
            versions=result.versions,
            segments=tuple(read_segments(job)),
        ),
        fence=lease.check,
        persist=wait,
    )
    differs = published.divergence or (published.manifest.divergences or (None,))[0]
    if differs is not None:
        text = f"{identity.stage} was built before with another result: {site.store.url}/{differs}"
        site.watch(identity.stage, {"kind": "warning", "text": text})
    return published
