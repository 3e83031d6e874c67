"""Build the runs of a sweep in one Prefect flow: shared stages once, and what is wanted next.

Each member is a run of its own in the store. One that fails does not stop the others: the flow ends
as failed and names it; the same flow run again builds what is missing.
"""

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prefect.futures import PrefectFuture, as_completed
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from flows.artifacts.runs import Run, RunRecord, Status, new_run
from flows.building.build import BuildContext, Built
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from flows.leases.outage import StoreWait
from flows.orchestration.flow_setup import (
    note_progress,
    open_flow,
    planned_by_caller,
    wait_of_run,
    warn,
)
from flows.orchestration.forms import run_flow
from flows.orchestration.stage_page import BackgroundWriter
from flows.orchestration.stage_runs import keeping_signals, stop_stages
from flows.orchestration.stage_task import submit
from flows.overrides import name_of
from flows.plan.render import totals
from flows.render.text import duration, money
from flows.render.vega import picture_url
from flows.run_request import RETRIES
from flows.sweep.grid import Member, Sweep, name_of_sweep, open_sweep
from flows.sweep.plan import Results, SweepPlan, Unit, plan_sweep, stages_of
from flows.sweep.request import SweepRequest
from flows.sweep.results import SweepReport, report_of_sweep, wanted_of, write_files
from infra.launch.torchrun import StageInterrupted
from nanochat_core.errors import NanochatError, StageError


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of several artifacts, summed over all executions of their jobs."""

    stages: int
    seconds: float
    dollars: float  # 0 where no price was given

    def __str__(self) -> str:
        return f"{self.stages} stages, {duration(self.seconds)}, {money(self.dollars)}"


@dataclass(frozen=True, kw_only=True)
class CompletedSweep:
    """The results of a sweep that completed."""

    report: SweepReport
    page: Path  # `write_files` says what is next to it
    built: Cost  # of what this flow run built; what an earlier, interrupted one began counts
    cached: Cost

    @property
    def cost_lines(self) -> list[str]:
        """The cost as sentences."""
        return [f"built now: {self.built}", f"reused: {self.cached}"]


def show_results(pages: BackgroundWriter, made: CompletedSweep) -> None:
    """Show the results in Prefect: the page with the cost, a plot."""
    report = made.report
    text = f"{report.page.markdown}\nPage on the machine that ran it: `{made.page}`\n"
    about = "; ".join(made.cost_lines)
    pages.show("results", "markdown", text, about=about)
    for plot in report.pictures[:1]:
        pages.show("plot", "image", picture_url([plot]), about=plot.caption)


@run_flow("sweep", SweepRequest, name_of=lambda request: f"sweep-{name_of_sweep(request)}")
def sweep(request: SweepRequest) -> CompletedSweep:
    """Train settings of a grid with several seeds, stop what ranks behind, and compare the rest."""
    known = planned_by_caller(request, SweepPlan)
    opened = known.sweep if known else open_sweep(request)
    # With the time of the flow run in it, so a retry finds the same records.
    when = str(flow_run.get_name()).removeprefix(f"sweep-{opened.name}-")
    ids = {member.label: f"{name_of(member.request)}-{when}" for member in opened.members}
    setup = open_flow(store=request.store, runs=ids.values())
    earlier = {label: setup.find_earlier(run) for label, run in ids.items()}
    largest = earlier[opened.largest.label]
    planned = known or setup.wait(
        lambda: plan_sweep(
            opened,
            setup.store,
            setup.caller.home,
            log=warn,
            known=largest.upstream if largest else {},
        )
    )
    opened = planned.sweep
    run = opened.largest.profile.run
    context = setup.open_context(run, planned.placement, strict=request.strict)
    note_progress(planned.plan.stages)
    if not planned.plan.up_to_date:
        setup.wait(setup.store.check_conditions)  # for leases
    runs = {
        member.label: new_run(
            ids[member.label],
            name_of(member.request),
            member.request,
            upstream=planned.pins,
            depth=member.depth,
        )
        for member in opened.members
    }
    runs |= {label: replace(runs[label], started=r.started) for label, r in earlier.items() if r}
    return build_units(
        opened,
        planned.units,
        context,
        runs,
        planned=planned,
        retries=request.retries,
    )


def build_units(
    sweep: Sweep,
    units: Sequence[Unit],
    context: BuildContext,
    runs: Mapping[str, Run],
    *,
    planned: SweepPlan | None = None,
    retries: int = RETRIES,
) -> CompletedSweep:
    """Build the wanted members, independent units concurrently, then report. In a flow only.

    `runs` are the records by member label; the plan is only shown. The members to build follow from
    the results so far, again after each unit. Once no unit runs, the results are shown and written
    even if some failed. Raises StageError that names the failed members, StageInterrupted if the
    sweep was stopped, and at the end the first error that is a bug of ours, unchanged.
    """
    work = _Work(
        sweep=sweep,
        units=units,
        context=context,
        runs=runs,
        store_wait=wait_of_run(context.store, context.stop, terms=context.terms),
        retries=retries,
    )
    with contextlib.closing(BackgroundWriter(f"sweep {sweep.name}")) as pages:
        pages.tag_flow_run(*(run.run for run in runs.values()))
        if planned is not None:
            about = f"{totals(planned.plan)['summary']}. Store: {context.store.url}"
            pages.show("plan", "table", stages_of(planned).tree(), about=about)
        try:
            with keeping_signals(context.stop):
                while True:
                    results = work.results()
                    wanted = wanted_of(sweep, results)
                    work.start([member for member in sweep.members if member.label in wanted])
                    if len(work.built) == len(work.futures):
                        break
                    work.wait()
            if work.fault is not None:
                raise work.fault
            for label in work.records:
                work.end_record(label)
        except BaseException as error:
            by_id = {runs[label].run: record for label, record in work.records.items()}
            stop_stages(error, context, list(work.futures.values()), by_id)
            raise
        # After failures too: the members that completed have results.
        errors = {label: str(error) for label, error in work.errors.items()}
        reported = report_of_sweep(sweep, results, context.store.url, errors=errors)
        page = write_files(context.placement.home, reported)
        get_run_logger().info(f"sweep: {page}")
        built = [built for built in work.built.values() if built]
        made = CompletedSweep(
            report=reported,
            page=page,
            built=cost_of(each for each in built if not each.cached),
            cached=cost_of(each for each in built if each.cached),
        )
        show_results(pages, made)
    if work.errors:
        raise _failed(sweep, results, work.errors, page)
    return made


@dataclass(kw_only=True)
class _Work:
    """The units of a sweep that were submitted, and the records of the members they are for."""

    sweep: Sweep
    units: Sequence[Unit]
    context: BuildContext
    runs: Mapping[str, Run]
    store_wait: StoreWait
    retries: int
    futures: dict[str, PrefectFuture[Built]] = field(default_factory=dict[str, Any])
    records: dict[str, RunRecord] = field(default_factory=dict[str, RunRecord])
    # By label of the units that ended; None: it failed, or one that it needs did.
    built: dict[str, Built | None] = field(default_factory=dict[str, Any])
    errors: dict[str, NanochatError] = field(default_factory=dict[str, Any])  # of units that failed
    # The first of another kind: a bug of ours, or a unit that was interrupted alone.
    fault: Exception | None = None

    def start(self, members: Sequence[Member]) -> None:
        """Record the members that are new, and submit those of their units that are not yet."""
        for member in members:
            if member.label in self.records:
                continue
            run = replace(self.runs[member.label], stages=self._stages(member.label))
            self.records[member.label] = RunRecord(self.context.store, run)
            self.store_wait(self.records[member.label].write)
            # Inputs come first among the units, so the futures of a unit's inputs exist.
            for unit in self.units:
                if unit.has(member.label) and unit.label not in self.futures:
                    self._submit(unit, member)

    def wait(self) -> None:
        """Wait until another unit has ended. Raises StageInterrupted if the sweep was stopped."""
        running = {f: label for label, f in self.futures.items() if label not in self.built}
        future = next(as_completed(list(running)))
        future.wait()  # it has ended: this only reads its state
        label = running[future]
        if self.context.stop.is_set():
            raise StageInterrupted(f"sweep {self.sweep.name} was stopped")
        state = future.state
        self.built[label] = future.result() if state.is_completed() else None
        if state.is_failed() or state.is_crashed() or state.is_cancelled():
            try:
                state.result()
            except Exception as error:  # noqa: BLE001 - the other points continue
                if isinstance(error, NanochatError) and not isinstance(error, StageInterrupted):
                    self.errors[label] = error
                else:
                    self.fault = self.fault or error

    def results(self) -> dict[str, Manifest | None]:
        """Return the last artifact of each member that has ended."""
        found: dict[str, Manifest | None] = {}
        for unit in self.units:
            if unit.stage.name == self.units[-1].stage.name and unit.label in self.built:
                built = self.built[unit.label]
                made = built.manifest if built else None
                found |= {m.label: made for m in unit.members if m.label in self.records}
        return found

    def end_record(self, label: str) -> None:
        """Write the final record of a member."""
        is_finished = all(self.built[u.label] for u in self.units if u.has(label))
        status: Status = "finished" if is_finished else "failed"
        # All its artifacts: one that ended while this member started may not be recorded yet.
        self.store_wait(lambda: self.records[label].end(status, self._stages(label)))

    def _stages(self, label: str) -> dict[str, str]:
        """Return the fingerprints of a member's artifacts so far, by stage."""
        mine = (self.built.get(unit.label) for unit in self.units if unit.has(label))
        return dict(built.manifest.ref for built in mine if built)

    def _submit(self, unit: Unit, member: Member) -> None:
        self.futures[unit.label] = submit(
            unit.stage,
            self._context_of(unit, member),
            self.runs[member.label],
            {source.stage.name: self.futures[source.label] for source in unit.inputs},
            force=False,
            retries=self.retries,
            label=unit.label,
        )

    def _context_of(self, unit: Unit, member: Member) -> BuildContext:
        """Return the context that the unit is built in, for the member that wants it first.

        Its events carry the unit's label, and its artifact is recorded in the runs of all members.
        """

        def watch(_: str, event: dict[str, Any]) -> None:
            self.context.watch(unit.label, event)

        def record(ref: ArtifactRef) -> None:
            for each in unit.members:
                if (found := self.records.get(each.label)) is not None:
                    found.add(ref)

        return replace(
            self.context,
            run=member.profile.run,
            run_id=self.runs[member.label].run,
            watch=watch,
            record=record,
        )


def _failed(
    sweep: Sweep, results: Results, failures: Mapping[str, NanochatError], page: Path
) -> StageError:
    """Return one error for all failures, with the first one's hint."""
    failed = [m.label for m in sweep.members if m.label in results and results[m.label] is None]
    errors = "; ".join(f"{label}: {error}" for label, error in failures.items())
    first = next(iter(failures.values()))
    return StageError(
        f"{len(failed)} of {len(sweep.members)} runs failed, {', '.join(failed)} "
        f"({errors}); results of the others: {page}",
        hint=first.hint or "run the same command again; finished stages are reused",
    )


def cost_of(artifacts: Iterable[Built]) -> Cost:
    """Return the sum over artifacts."""
    made = [built.manifest.provenance for built in artifacts]
    return Cost(
        stages=len(made),
        seconds=math.fsum(each.seconds for each in made),
        dollars=math.fsum(each.dollars for each in made),
    )
