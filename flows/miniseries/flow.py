"""The Prefect flow `miniseries`: one profile at several depths, and the law of their losses.

All depths are submitted at once, and stages that they share are built once. Each depth is a run of
its own in the store. A depth that fails does not stop the others: the flow ends as failed and names
it; the same flow run again builds what is missing.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from prefect import flow
from prefect.futures import PrefectFuture, wait
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from flows.artifacts.runs import Run, RunRecord, Status, new_run, new_run_id, timestamp
from flows.build.build import BuildContext, Built
from flows.identity.ref import ArtifactRef
from flows.leases.queue import PriorityQueue, QueueEntry
from flows.miniseries.files import Files, write_files
from flows.miniseries.findings import Findings, analyse
from flows.miniseries.page import SeriesPages
from flows.miniseries.plan import SeriesPlan, plan_series
from flows.miniseries.series import (
    LEAST_DEPTHS,
    MOST_DEPTHS,
    Series,
    Unit,
    open_series,
    pin_members,
)
from flows.orchestration.caller import LOCAL_RUN, cancellable
from flows.orchestration.forms import takes
from flows.orchestration.pipeline import (
    check_restart_limit,
    ignore_events,
    open_starts,
    pin_names,
    wait_of_run,
    with_pool,
)
from flows.orchestration.stage_runs import stop_stages
from flows.orchestration.stage_task import failing_in_a_line, submit
from flows.overrides import default_name
from flows.plan.upstream import SECTIONS
from flows.profiles import make_placement
from flows.run_request import (
    OVERRIDES,
    PROFILE,
    RETRIES,
    RUN_NAME,
    STRICT,
    InStore,
    OnMachine,
    OnNodes,
    Option,
)
from infra.launch.torchrun import StageInterrupted
from infra.placement import default_home
from infra.storage.open import open_store
from nanochat_core.errors import ConfigError, NanochatError, StageError

DEPTHS = (2, 3, 4, 6)


@dataclass(frozen=True, kw_only=True)
class MiniseriesRequest(InStore, OnNodes, OnMachine):
    """All parameters of the flow `miniseries`."""

    profile: Annotated[str, PROFILE] = "tiny"
    depths: Annotated[
        tuple[int, ...],
        Option(
            label="Depths",
            help="Two to twelve different numbers of transformer layers.",
            group="settings",
            rules={
                "items": {"type": "integer", "minimum": 1, "maximum": 100},
                "minItems": LEAST_DEPTHS,
                "maxItems": MOST_DEPTHS,
                "uniqueItems": True,
            },
        ),
    ] = DEPTHS
    overrides: Annotated[tuple[str, ...], OVERRIDES] = ()
    run_name: Annotated[
        str | None,
        replace(
            RUN_NAME,
            label="Name of the series",
            help="Name of the series, whose runs are NAME-d4 and so on; by default the profile's.",
        ),
    ] = None
    strict: Annotated[bool, STRICT] = False


@dataclass(frozen=True, kw_only=True)
class MiniseriesResult:
    """The results of a series that completed."""

    findings: Findings
    files: Files
    built: int  # number of stages
    cached: int  # number of stages
    ui_url: str | None  # Prefect's page of the flow run


def _name_flow_run() -> str:
    """Return a name of the series' name and the time; a retry keeps its name."""
    if flow_run.get_run_count():  # attempts before this one: it counts itself once it is running
        return flow_run.get_name() or ""
    parameters = flow_run.get_parameters()
    name = parameters["run_name"]
    try:
        name = name or default_name(parameters["profile"], overrides=parameters["overrides"])
    except ConfigError:  # a wrong setting: the flow itself reports it
        name = parameters["profile"]
    return new_run_id(f"miniseries-{name}", timestamp(time.time()))


@flow(name="miniseries", flow_run_name=_name_flow_run, retries=0, persist_result=False)
@failing_in_a_line
@cancellable
@takes(MiniseriesRequest)
def miniseries(request: MiniseriesRequest) -> MiniseriesResult:
    """Train and evaluate a profile's base model at several depths, and fit its scaling law."""
    caller = LOCAL_RUN.get()
    series = open_series(
        request.profile, request.depths, overrides=request.overrides, name=request.run_name
    )
    # One placement for all depths, of the largest, which fills the most GPUs.
    largest_depth, largest = series.members[-1].depth, series.members[-1].profile
    home = caller.home if caller else default_home()
    placement = make_placement(
        largest.pace, home=home, store=request.store, gpus=request.gpus, settings=request.place
    )
    opened_store = open_store(placement.store)
    run_id = flow_run.get_name() or series.name
    # With the time of the flow run in it, so a retry finds the same records.
    ids = {
        member.depth: f"{member.name}-{run_id.removeprefix(f'miniseries-{series.name}-')}"
        for member in series.members
    }
    stop = caller.stop if caller else threading.Event()
    store_wait = wait_of_run(opened_store, stop)
    starts = store_wait(lambda: open_starts(opened_store, list(ids.values()), pool=request.pool))
    placement = with_pool(placement, nodes=request.nodes, pool=request.pool)
    placement.home.mkdir(parents=True, exist_ok=True)
    largest_id, warn = ids[largest_depth], get_run_logger().warning
    # Resolved once for all depths: a name that moves in between must not give them other data.
    pinned, pins = store_wait(
        lambda: pin_names(largest.run, opened_store, largest_id, placement, SECTIONS, log=warn)
    )
    series = pin_members(series, pins)
    context = BuildContext(
        run=pinned,
        run_id=run_id,
        placement=placement,
        store=opened_store,
        watch=caller.watch if caller else ignore_events,
        strict=request.strict,
        stop=stop,
    )
    planned = store_wait(lambda: plan_series(series, context.store, context.work, placement))
    # A checkpoint found by the plan counts as progress of the start before.
    for depth, run in ids.items():
        mine = [item for unit, item in planned.items if unit.has(depth)]
        starts = starts.add_plan(run, mine)
    check_restart_limit(opened_store, starts, pool=request.pool)
    if planned.plan.exit_code:
        store_wait(context.store.check_conditions)
    runs = {
        member.depth: new_run(
            ids[member.depth],
            member.name,
            request,
            upstream=pins,
            depth=member.depth,
            overrides=member.overrides,
        )
        for member in series.members
    }
    runs = {depth: starts.record_in(run) for depth, run in runs.items()}
    return sweep(series, planned.units, context, runs, planned=planned, retries=request.retries)


def sweep(
    series: Series,
    units: Sequence[Unit],
    context: BuildContext,
    runs: Mapping[int, Run],
    *,
    planned: SeriesPlan | None = None,
    retries: int = RETRIES,
) -> MiniseriesResult:
    """Build all units, independent ones concurrently, then analyse the results. In a flow only.

    `runs` are the records by depth; the plan is only shown. Once all units have ended, the results
    are shown and written even if some failed. Raises StageError that names the failed depths,
    StageInterrupted if the series was stopped, and bugs of ours unchanged.
    """
    records = {depth: RunRecord(context.store, run) for depth, run in runs.items()}
    store_wait = wait_of_run(context.store, context.stop, terms=context.terms)
    pages = SeriesPages(series.name, [run.run for run in runs.values()])
    if planned is not None:
        pages.show_plan(planned)
    queue = PriorityQueue()
    futures: dict[str, PrefectFuture[Built]] = {}
    try:
        for record in records.values():
            store_wait(record.write)
        # Inputs come first among the units, so the futures of a unit's inputs exist.
        for unit in units:
            futures[unit.label] = submit(
                unit.stage,
                _context_of(unit, context, runs, records, queue),
                runs[unit.members[0].depth],
                {source.stage.name: futures[source.label] for source in unit.inputs},
                force=False,
                retries=retries,
                label=unit.label,
            )
        wait(list(futures.values()))
        failures = _failures(futures)
        ended = {
            depth: store_wait(partial(record.end, _status(units, depth, futures)))
            for depth, record in records.items()
        }
    except BaseException as error:
        by_id = {run.run: records[depth] for depth, run in runs.items()}
        stop_stages(error, context, list(futures.values()), by_id)
        pages.close()
        raise
    # After failures too: the depths that completed have results, and may have a law.
    try:
        findings = store_wait(
            lambda: analyse(context.store, ended, name=series.name, profile=series.profile)
        )
        files = write_files(context.placement.home, findings)
        get_run_logger().info(f"miniseries: {files.page}")
        pages.show_findings(findings, files)
    finally:
        pages.close()
    if failures:
        raise _failed(series, units, failures, files)
    cached = sum(future.result().cached for future in futures.values())
    return MiniseriesResult(
        findings=findings,
        files=files,
        built=len(futures) - cached,
        cached=cached,
        ui_url=flow_run.get_flow_run_ui_url(),
    )


def _context_of(
    unit: Unit,
    context: BuildContext,
    runs: Mapping[int, Run],
    records: Mapping[int, RunRecord],
    queue: PriorityQueue,
) -> BuildContext:
    """Return the context that the unit is built in.

    Its events carry the unit's label, and its artifact is recorded in the runs of all its members.
    """

    def watch(_: str, event: dict[str, Any]) -> None:
        context.watch(unit.label, event)

    def record(ref: ArtifactRef) -> None:
        for member in unit.members:
            records[member.depth].add(ref)

    first = unit.members[0]
    return replace(
        context,
        run=first.profile.run,
        run_id=runs[first.depth].run,
        watch=watch,
        record=record,
        # The smallest model gets the device first, so that results come early.
        device=QueueEntry(queue=queue, rank=(first.depth,)),
    )


def _failures(futures: Mapping[str, PrefectFuture[Built]]) -> dict[str, NanochatError]:
    """Return the errors of failed units by label, without units that waited for them in vain.

    Raises StageInterrupted if a unit was interrupted.
    """
    found: dict[str, NanochatError] = {}
    for label, future in futures.items():
        state = future.state
        if state.is_failed() or state.is_crashed() or state.is_cancelled():
            try:
                state.result()
            except StageInterrupted:
                raise
            except NanochatError as error:
                found[label] = error
    return found


def _status(
    units: Sequence[Unit], depth: int, futures: Mapping[str, PrefectFuture[Built]]
) -> Status:
    mine = (futures[unit.label].state for unit in units if unit.has(depth))
    is_done = all(state.is_completed() for state in mine)
    return "finished" if is_done else "failed"


def _failed(
    series: Series, units: Sequence[Unit], failures: Mapping[str, NanochatError], files: Files
) -> StageError:
    """Return one error for all failures, with the first one's hint."""
    depths = {m.depth for unit in units if unit.label in failures for m in unit.members}
    labels = ", ".join(f"d{depth}" for depth in sorted(depths))
    said = "; ".join(f"{label}: {error}" for label, error in failures.items())
    first = next(iter(failures.values()))
    return StageError(
        f"{len(depths)} of {len(series.members)} depths failed, {labels} ({said}); "
        f"results of the others: {files.page}",
        hint=first.hint or "run the same command again; finished stages are reused",
    )
