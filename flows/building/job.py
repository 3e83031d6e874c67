"""Run a stage's job under its lease: fetch inputs, restore and mirror checkpoints, start processes.

On several nodes this is node 0's side, with flows/building/coordinator.py; the other nodes' side is
flows/building/nodes.py.
"""

import contextlib
import shutil
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flows.artifacts import checkpoints
from flows.artifacts.cache import Cache, fetch
from flows.building.code_check import CodeChanged, CodeCheck
from flows.building.context import BuildContext
from flows.building.coordinator import Coordinator, lead
from flows.building.executions import append_segment
from flows.identity.fingerprint import Code, Identity, plugins_of
from flows.identity.manifest import Manifest
from flows.identity.work import measure_work
from flows.leases import file_lock
from flows.leases.held_lease import HeldLease, LeaseLost
from flows.leases.outage import WaitLog
from flows.stages import PRETRAIN, Stage
from infra.launch.fitting import fitting
from infra.launch.mirror import mirror
from infra.launch.torchrun import StageInterrupted, run_job
from nanochat_core.errors import ConfigError, OutOfMemory, StageError, StoreError
from nanochat_core.job import Job, Resources, Result, digests_of
from nanochat_core.section import Section

# Of one GPU: ten minutes of an H100 at 40 % of its peak in bf16. A graph of the whole pass takes
# minutes to compile. Only of pretraining are the FLOPs known; other stages are usually shorter.
LONG_FLOPS = 600 * 0.4 * 989e12


def nodes_of(stage: Stage, context: BuildContext) -> int:
    """Return the number of machines that build a stage together."""
    return context.placement.nodes if stage.compute == "gpu" else 1


def processes_of(stage: Stage, context: BuildContext) -> int:
    """Return the number of processes of a stage on each machine."""
    return max(context.placement.gpus, 1) if stage.compute == "gpu" else 1


def fetch_inputs(
    stage: Stage,
    context: BuildContext,
    inputs: Mapping[str, Manifest],
    cache: Cache,
    *,
    check: Callable[[], None],
) -> dict[str, Path]:
    """Fetch the inputs and return the directory of each one's files, by stage name.

    `check` is called after every block of bytes and may raise (the lease is lost).
    """

    def check_not_stopped(count: int) -> None:
        context.pause(stage.name, 0)
        check()

    names = [source.name for source in stage.inputs]
    if names:
        context.watch(stage.name, {"kind": "fetching", "inputs": names})
    wait = context.wait_for_store(stage.name, check=check)

    def fetch_one(name: str) -> Path:
        return wait(lambda: fetch(context.store, inputs[name], cache, on_bytes=check_not_stopped))

    return {name: fetch_one(name) / "files" for name in names}


def resources_of(stage: Stage, context: BuildContext) -> Resources:
    """Return the placement as the stage's job sees it, with `compile=auto` decided.

    A rule and no estimate, which past builds change: a stage that resumes must compile the same.
    """
    resources = context.placement.resources
    if resources.compile != "auto":
        return resources
    flops = measure_work(stage, context.run).amount if stage is PRETRAIN else 0.0
    each = flops / (nodes_of(stage, context) * processes_of(stage, context))
    return replace(resources, compile=True if each >= LONG_FLOPS else "blocks")


def make_job(
    stage: Stage, context: BuildContext, identity: Identity, inputs: dict[str, Path]
) -> Job:
    """Make the job that builds the stage's artifact on this machine, with what fits its memory."""
    sections = {name: getattr(context.run, name) for name in stage.config}
    job = Job(
        directory=file_lock.work_directory(context.work, identity.ref),
        stage=stage.name,
        entry=stage.entry,
        fingerprint=identity.fingerprint,
        config={n: s.tree() if isinstance(s, Section) else s for n, s in sections.items()},
        inputs=inputs,
        resources=resources_of(stage, context),
        plugins=plugins_of(stage, context.run),
    )
    found, given = fitting(job), job.resources.device_batch_size
    if (size := found.resources.device_batch_size) != given:
        context.log(stage.name)(
            f"{given} rows did not fit this machine's memory before: it takes {size}"
        )
    return found


def report_building(stage: Stage, context: BuildContext, job: Job) -> None:
    """Report, as a `building` event, that the job is about to start here."""
    event = {
        "kind": "building",
        "fingerprint": job.fingerprint,
        "processes": nodes_of(stage, context) * processes_of(stage, context),
        "directory": str(job.directory),
    }
    context.watch(stage.name, event)


def make_check(context: BuildContext, identity: Identity, job: Job, code: Code) -> CodeCheck:
    """Return a check that the job runs only code that its fingerprint covers.

    What an earlier attempt with other code left is removed.
    """
    warn = context.log(job.stage, "warning")
    check = CodeCheck(identity, job, code, strict=context.strict, warn=warn)
    try:
        check()
    except CodeChanged as error:
        warn(f"what an earlier attempt saved is not used: {error}")
        shutil.rmtree(job.directory)
    return check


def run_stage(
    stage: Stage, context: BuildContext, job: Job, lease: HeldLease, check: CodeCheck
) -> Result:
    """Run the job to its end, or return the result of an earlier attempt that was not published.

    With several nodes it starts when all of them are ready.
    Raises LeaseLost if the lost lease ended it, and not the run's stop; NodeLost if another node
    did; CodeChanged if it ran other code than its fingerprint covers.
    """
    log = context.log(job.stage)
    nodes, processes = nodes_of(stage, context), processes_of(stage, context)
    if (finished := find_finished(job)) is not None:
        log("an earlier attempt finished this job; its output is published")
        return finished
    if nodes > 1 and not context.placement.mirrors_checkpoints:
        raise ConfigError(
            f"{stage.name} on {nodes} nodes needs a store that all of them reach, "
            f"{context.store.url} is a directory of one",
            hint="give one with --store or NANOCHAT_STORE",
        )
    # Even if the store is a directory in this home, to which checkpoints are not mirrored: another
    # machine that reaches it may have uploaded some.
    wait = context.wait_for_store(stage.name, check=lease.raise_if_lost)
    wait(lambda: checkpoints.restore(context.store, job, log=log))
    report_building(stage, context, job)

    stopping = threading.Event()  # this job was asked to stop, here or on another node

    with contextlib.ExitStack() as stack:
        # The coordinator before the mirror, so that the last checkpoint is still sent with the
        # other nodes' shards: the stack closes in reverse.
        coordinator = None
        if nodes > 1:
            coordinator = stack.enter_context(
                lead(context, job, lease, nodes=nodes, processes=processes)
            )
        if context.placement.mirrors_checkpoints:
            stack.enter_context(_mirror(context, job, lease, coordinator, check, stopping))
        try:
            while True:
                append_segment(job, processes=nodes * processes, nodes=nodes)
                try:
                    return run_job(
                        job,
                        processes=processes,
                        on_event=_follow(context, stage, lease, stopping),
                        stop=coordinator.ending if coordinator else context.stop,
                        check=partial(_check, context, lease, check),
                        root=context.root,
                        rendezvous=coordinator.rendezvous if coordinator else None,
                    )
                except OutOfMemory as error:
                    if coordinator is not None:  # several nodes start again together, as a retry
                        raise
                    job = fitting(job)
                    size = job.resources.device_batch_size
                    # The rows of a step are the same; only the order differs in which they are
                    # summed.
                    log(f"{error}; it starts again with {size} rows, from what it saved")
        except StageError as error:
            if (cause := _cause(error, context, lease, coordinator)) is error:
                raise
            raise cause from error


def _check(context: BuildContext, lease: HeldLease, check: CodeCheck) -> None:
    """Raise CodeChanged or LeaseLost if the job must not continue."""
    check()
    if not context.stop.is_set():  # else the stop is the cause to report
        lease.raise_if_lost()


def _follow(
    context: BuildContext, stage: Stage, lease: HeldLease, stopping: threading.Event
) -> Callable[[dict[str, Any]], None]:
    """Return what passes a job's events to the run, and notes what the build needs of them."""

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] in ("start", "step"):
            # Written with the next heartbeat: plans and waiting processes show it as progress.
            lease.note(step=event["step"], total=event["total"])
        if event["kind"] == "stopping":
            stopping.set()
        context.watch(stage.name, event)

    return on_event


def find_finished(job: Job) -> Result | None:
    """Return the result of an execution of this very job that finished and whose output is whole.

    None means the job has to run. The directory of a finished job stays until its artifact is
    published, so an attempt whose publishing failed leaves one here.
    """
    try:
        result = Result.find(job.directory)
        if result is None or result.status != "finished" or not job.is_written():
            return None
        is_whole = result.output == digests_of(job.output)
    except (OSError, StageError, KeyError):  # written by another version, or a bad block
        return None
    return result if is_whole else None


def _cause(
    error: StageError, context: BuildContext, lease: HeldLease, coordinator: Coordinator | None
) -> StageError:
    """Return the error that ended the job. Raises LeaseLost if the lost lease ended it."""
    # The lease may be lost while the run is being stopped: the stop is the cause to report.
    if context.stop.is_set():
        return error
    if isinstance(error, StageInterrupted | LeaseLost):
        lease.raise_if_lost()
    return error if coordinator is None else coordinator.explain(error)


@contextlib.contextmanager
def _mirror(
    context: BuildContext,
    job: Job,
    lease: HeldLease,
    coordinator: Coordinator | None,
    check: CodeCheck,
    stopping: threading.Event,
) -> Generator[None]:
    """Upload every new checkpoint to the store while the block runs.

    On several nodes the others upload their shards first, and node 0 its own once rank 0 has
    committed. The checkpoint of the last step is sent only if the job does not finish: its tensors
    are uploaded as files of the artifact, after which no process needs it.
    """
    has_ended = False

    def skip(directory: Path) -> bool:
        # Unknown while the job runs, so its last step is held back; the mirror asks once more after
        # the block.
        result = Result.find(job.directory) if has_ended else None
        has_failed = has_ended and (result is None or result.status != "finished")
        return not has_failed and checkpoints.is_of_last_step(directory)

    def send(directory: Path, check_wanted: Callable[[], None]) -> None:
        check()  # a checkpoint of other code must not be resumed under this fingerprint
        sent = checkpoints.send(
            context.store,
            job,
            directory,
            owner=lease.record.owner,
            fencing_token=lease.record.epoch,
            check_lease=lease.check,
            check_wanted=check_wanted,
            there=coordinator.shards(checkpoints.step_of(directory)) if coordinator else (),
        )
        with contextlib.suppress(StoreError):  # the next checkpoint prunes these steps too
            checkpoints.prune(context.store, job, sent=sent)

    # The mirror retries every second; the warning is not repeated.
    warnings = WaitLog(context.log(job.stage, "warning"), every=context.terms.report)
    with mirror(
        job.checkpoints,
        send,
        on_error=lambda error: warnings.report(str(error), f"checkpoint not stored: {error}"),
        skip=skip,
        is_stopping=lambda: stopping.is_set() or context.stop.is_set() or bool(lease.lost),
    ):
        try:
            yield
        finally:
            has_ended = True
