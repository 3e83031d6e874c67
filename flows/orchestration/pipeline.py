"""The Prefect flow `nanochat`: builds every stage of the table, each once its inputs exist."""

import contextlib
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.futures import PrefectFuture, wait
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from flows.artifacts.cache import fetch
from flows.artifacts.runs import (
    Run,
    RunRecord,
    find_run,
    name_in,
    new_run,
    new_run_id,
    timestamp,
)
from flows.build.build import BuildContext, Built, reserve_found
from flows.identity.manifest import Manifest
from flows.leases.held_lease import LeaseTimings
from flows.leases.outage import StoreWait
from flows.orchestration.caller import LOCAL_RUN, cancellable
from flows.orchestration.forms import takes
from flows.orchestration.run_page import RunPages
from flows.orchestration.stage_runs import cancel_requests_of, check_pool, stop_stages
from flows.orchestration.stage_task import failing_in_a_line, submit
from flows.overrides import name_of, open_name
from flows.plan.pinned import open_pinned, sections_of, stages_with
from flows.plan.plan import Plan, make_plan
from flows.plan.starts import Starts, read_starts
from flows.plan.upstream import Log, Pins, moving_names, pin
from flows.profiles import make_placement, open_profile
from flows.run_request import RETRIES, RunRequest
from flows.stages import REPORT, Stage, stages_to_redo
from infra.placement import Placement
from infra.storage.base import Store
from infra.storage.open import open_store
from nanochat_core.config import RunConfig
from nanochat_core.errors import ArtifactError, ConfigError, StageError, StoreError

REPORT_PAGE = "report.html"
_REPORT_TEXT = "report.md"
MOST_STARTS = 10  # of one flow run in a row without progress: an automation resumes crashed ones


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The results of a run that completed."""

    run: Run
    stages: dict[str, Built]
    report: Path | None  # the report card's page on this machine
    ui_url: str | None  # Prefect's page of the flow run


def _name_flow_run() -> str:
    """Return the run's id as the flow run's name; a retry keeps its name."""
    if flow_run.get_run_count():  # attempts before this one: it counts itself once it is running
        return flow_run.get_name() or ""
    request = RunRequest(**flow_run.get_parameters())
    try:
        name = name_of(request.profile, request.resolved)
    except ConfigError:  # a wrong setting: the flow itself reports it
        name = request.run_name or request.profile
    # `nanochat submit` has given it an id already, by which its user finds it.
    if name_in(run_id := flow_run.get_name() or "") == name:
        return run_id
    return new_run_id(name, timestamp(time.time()))


@flow(name="nanochat", flow_run_name=_name_flow_run, retries=0, persist_result=False)
@failing_in_a_line
@cancellable
@takes(RunRequest)
def nanochat(request: RunRequest) -> Outcome:
    """Train, evaluate and report a model. Stages that are up to date are reused."""
    caller = LOCAL_RUN.get()
    # The record and the requests for stages have what the short fields stand for.
    request = request.resolved
    opened = open_profile(request.profile, depth=request.depth, overrides=request.overrides)
    placement = make_placement(
        opened.pace,
        home=caller.home if caller else None,
        store=request.store,
        gpus=request.gpus,
        settings=request.place,
    )
    store = open_store(placement.store)
    run_id = flow_run.get_name() or request.profile
    stop = caller.stop if caller else threading.Event()
    store_wait = wait_of_run(store, stop)
    starts = store_wait(lambda: open_starts(store, [run_id], pool=request.pool))
    name = store_wait(lambda: open_name(store, request.profile, request))
    placement = with_pool(placement, nodes=request.nodes, pool=request.pool)
    placement.home.mkdir(parents=True, exist_ok=True)
    warn = get_run_logger().warning
    pinned = store_wait(lambda: open_pinned(store, request.use, warn=warn))
    sections = sections_of(pinned)
    resolved, pins = store_wait(
        lambda: pin_names(opened.run, store, run_id, placement, sections, log=warn)
    )
    context = BuildContext(
        run=resolved,
        run_id=run_id,
        placement=placement,
        store=store,
        watch=caller.watch if caller else ignore_events,
        strict=request.strict,
        stop=stop,
    )
    plan = store_wait(
        lambda: make_plan(
            context.run,
            store,
            context.work,
            force=frozenset(request.force),
            from_stage=request.from_stage,
            pinned=pinned,
            placement=placement,
        )
    )
    starts = starts.add_plan(run_id, plan.stages)
    check_restart_limit(store, starts, pool=request.pool)
    # Leases need a store with conditional writes; a run that builds nothing needs no lease.
    if plan.exit_code:
        store_wait(store.check_conditions)
    run = starts.record_in(new_run(run_id, name, request, upstream=pins, uses=request.use))
    stages = stages_with(pinned)
    redo = stages_to_redo(stages, force=request.force, from_stage=request.from_stage)
    return run_pipeline(
        stages, context, run, plan=plan, redo=redo, pinned=pinned, retries=request.retries
    )


def pin_names(
    run: RunConfig,
    store: Store,
    run_id: str,
    placement: Placement,
    sections: Collection[str],
    *,
    log: Log,
) -> tuple[RunConfig, Pins]:
    """Resolve upstream names like `flows.plan.upstream.pin`; keep what was resolved already.

    An earlier start of this run, or the command that runs it, may have resolved some. A damaged
    record of this run is reported and has no pins. Raises ConfigError, DataError.
    """
    if not moving_names(run, sections):
        return run, {}
    caller, earlier = LOCAL_RUN.get(), None
    try:
        earlier = find_run(store, run_id)
    except ArtifactError as error:
        log(f"{error}; names upstream are resolved again")
    known = (caller.pins if caller else {}) | (earlier.upstream if earlier else {})
    return pin(run, placement.home, log=log, known=known, sections=sections)


def with_pool(placement: Placement, *, nodes: int, pool: str | None) -> Placement:
    """Return the placement of a run whose GPU stages `pool` builds; None: the flow's process.

    Raises ConfigError if the pool takes no stages, or if several nodes have no pool.
    """
    if pool is not None:
        check_pool(pool)
    elif nodes != 1:
        raise ConfigError(
            f"nodes is {nodes}, but a run without a pool uses this machine only",
            hint="name the work pool whose workers run on the machines, such as gpu",
        )
    return replace(placement, nodes=nodes, pool=pool)


def run_pipeline(
    stages: Sequence[Stage],
    context: BuildContext,
    run: Run,
    *,
    plan: Plan | None = None,
    redo: frozenset[str] = frozenset(),
    pinned: Mapping[str, Manifest] | None = None,
    retries: int = RETRIES,
) -> Outcome:
    """Build every stage, independent ones concurrently, and record the run. Inside a flow only.

    A stage whose artifact is `pinned` is not built; a lost one is retried up to `retries` times.
    The `plan` is only shown. Raises the error of the first failed stage in the table, after the
    stages that do not depend on it have ended.
    """
    record = RunRecord(context.store, run)
    context = replace(context, record=record.add)
    store_wait = wait_of_run(context.store, context.stop, terms=context.terms)
    store_wait(record.write)
    there = {name: _reused(context, manifest) for name, manifest in (pinned or {}).items()}
    pages = RunPages(run, context.store)
    if plan is not None:
        pages.show_plan(plan)
    futures: dict[str, PrefectFuture[Built]] = {}
    try:
        # The table lists inputs first, so the futures of a stage's inputs exist.
        for stage in (stage for stage in stages if stage.name not in there):
            inputs: dict[str, Any] = {
                source.name: there.get(source.name) or futures[source.name]
                for source in stage.inputs
            }
            futures[stage.name] = submit(
                stage, context, run, inputs, force=stage.name in redo, retries=retries
            )
        wait(list(futures.values()))
        built = there | _results(futures)
        pages.show_artifacts(built)
        report = _show_report(context, built.get(REPORT.name), pages, store_wait)
    except BaseException as error:
        if not stop_stages(error, context, list(futures.values()), {run.run: record}):
            pages.show_artifacts(there | _finished(futures))
        raise
    finally:
        pages.close()
    fingerprints = {name: b.manifest.fingerprint for name, b in built.items()}
    return Outcome(
        run=store_wait(lambda: record.end("finished", fingerprints)),
        stages=built,
        report=report,
        ui_url=flow_run.get_flow_run_ui_url(),
    )


def wait_of_run(
    store: Store,
    stop: threading.Event,
    *,
    terms: LeaseTimings = LeaseTimings(),  # noqa: B008 - frozen
) -> StoreWait:
    """Return a retry policy for the run's own store requests that waits without a limit."""
    log = get_run_logger()
    return StoreWait(store, "the run", report=log.warning, stop=stop, terms=terms)


def open_starts(
    store: Store, runs: Sequence[str], *, pool: str | None, will_plan: bool = True
) -> Starts:
    """Return what earlier starts of this flow run reached. Raises what check_restart_limit raises.

    `runs` are the ids of the records that the flow run writes. If a plan follows, one more start is
    allowed, since only the plan finds the checkpoints of the start before. Call this before
    anything that may end the process, or a run that always crashes there is resumed forever.
    """
    starts = read_starts(store, runs, number=flow_run.get_run_count())
    check_restart_limit(store, starts, pool=pool, spare=int(will_plan))
    return starts


def check_restart_limit(store: Store, starts: Starts, *, pool: str | None, spare: int = 0) -> None:
    """Raise StageError if MOST_STARTS in a row made no progress; cancel the remote stages.

    The error ends resuming: the flow run becomes Failed, and only Crashed ones are resumed.
    """
    if starts.idle < MOST_STARTS + spare:
        return
    for run in starts.reached:
        if pool is not None:
            cancel_requests_of(run)
        with contextlib.suppress(StoreError, ArtifactError):  # may be what ended the starts before
            if (found := find_run(store, run)) is not None:
                RunRecord(store, found).end("failed")
    raise StageError(
        f"{next(iter(starts.reached))} was started {starts.number} times; the last {starts.idle} "
        "got no further than those before",
        hint="find in its logs what ended it; a new run resumes from what is stored",
    )


def _reused(context: BuildContext, manifest: Manifest) -> Built:
    """Return an artifact that is used for its stage. Raises what `reserve_found` raises."""
    context.wait_for_store(manifest.stage)(lambda: reserve_found(context, [manifest]))
    uri = f"{context.store.url}/{manifest.ref.manifest_key}"
    context.watch(manifest.stage, {"kind": "cached", "uri": uri})
    return Built(manifest=manifest, uri=uri, cached=True)


def ignore_events(stage: str, event: Mapping[str, Any]) -> None:
    """Ignore an event: those of a deployed run are shown by Prefect alone."""


def _results(futures: Mapping[str, "PrefectFuture[Built]"]) -> dict[str, Built]:
    """Return every stage's artifact. Raises the first failed stage's error."""
    states = [future.state for future in futures.values()]
    for state in states:
        if state.is_failed() or state.is_crashed() or state.is_cancelled():
            state.result()
    return {name: future.result() for name, future in futures.items()}


def _finished(futures: Mapping[str, "PrefectFuture[Built]"]) -> dict[str, Built]:
    """Return the artifacts of the stages that completed."""
    return {name: f.result() for name, f in futures.items() if f.state.is_completed()}


def _show_report(
    context: BuildContext, built: Built | None, pages: RunPages, store_wait: StoreWait
) -> Path | None:
    """Show the report card in Prefect; return the path of its page, or None without one."""
    if built is None:
        return None
    with context.open_cache() as cache:
        files = store_wait(lambda: fetch(context.store, built.manifest, cache)) / "files"
        text = files / _REPORT_TEXT
        if text.exists():
            pages.show_report(text.read_text(encoding="utf-8"), built.uri)
        page = files / REPORT_PAGE
        get_run_logger().info(f"report card: {page}")
        return page if page.exists() else None
