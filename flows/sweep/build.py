"""Build the runs of a sweep in one Prefect flow: shared stages once, and what is wanted next.

Each member is a run of its own in the store. One that fails does not stop the others: the flow ends
as failed and names it; the same flow run again builds what is missing.
"""

import contextlib
import math
import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger

from flows.artifacts.runs import Run, RunRecord, Status, new_run
from flows.building.build import BuildContext, Built
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from flows.leases.outage import StoreWait
from flows.orchestration.flow_setup import open_flow, planned_by_caller, run_flow, wait_of_run
from flows.orchestration.stage_page import BackgroundWriter
from flows.orchestration.stage_runs import keeping_signals, stop_stages
from flows.orchestration.stage_task import submit
from flows.render.charts import data_url
from flows.render.table import as_lines
from flows.render.text import duration, fenced, money
from flows.render.vega import picture
from flows.run_request import RETRIES
from flows.sweep.files import SweepReport, write_files
from flows.sweep.grid import Member, Sweep, name_of_sweep, open_sweep
from flows.sweep.plan import Results, SweepPlan, Unit, lines_of, plan_sweep
from flows.sweep.request import SweepRequest
from flows.sweep.results import report_of_sweep, wanted_of
from infra.launch.torchrun import StageInterrupted
from nanochat_core.errors import NanochatError, StageError


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of several artifacts, summed over all executions of their jobs."""

    stages: int
    seconds: float
    gpu_hours: float
    dollars: float  # 0 where no price was given

    def __str__(self) -> str:
        gpus = f", {self.gpu_hours:.3g} GPU-hours" if self.gpu_hours else ""
        return f"{self.stages} stages, {duration(self.seconds)}{gpus}, {money(self.dollars)}"


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a sweep cost: the stages that this flow run built, and those that it reused."""

    built: Cost
    cached: Cost

    @property
    def lines(self) -> Iterator[str]:
        """The cost as sentences."""
        yield f"built now: {self.built}"
        yield f"reused: {self.cached}"


@dataclass(frozen=True, kw_only=True)
class CompletedSweep:
    """The results of a sweep that completed."""

    report: SweepReport
    page: Path  # `write_files` says what is next to it
    spent: Spent


def show_plan(pages: BackgroundWriter, planned: SweepPlan) -> None:
    """Show in Prefect what the sweep is about to do."""
    lines = list(as_lines(lines_of(planned)))
    about = f"{lines[-1]}. Store: {planned.plan.store}"
    pages.show("plan", "markdown", fenced("\n".join(lines)), about=about)


def show_report(
    pages: BackgroundWriter, report: SweepReport, page: Path, cost: Iterable[str]
) -> None:
    """Show the results in Prefect: a table of models, sentences with the cost, a plot."""
    sentences = "\n".join(f"- {sentence}" for sentence in (*report.sentences, *cost))
    text = f"{sentences}\n\nPage on the machine that ran it: `{page}`\n"
    pages.show("models", "table", report.table.tree(), about=report.lead)
    pages.show("findings", "markdown", text, about="What the numbers say")
    for plot in report.pictures[:1]:
        pages.show("plot", "image", data_url(picture([plot])), about=plot.caption)


@run_flow("sweep", SweepRequest, name_of=lambda request: f"sweep-{name_of_sweep(request)}")
def sweep(request: SweepRequest) -> CompletedSweep:
    """Train settings of a grid with several seeds, stop what ranks behind, and compare the rest."""
    known = planned_by_caller(request, SweepPlan)
    opened = known.sweep if known else open_sweep(request)

    setup = open_flow(store=request.store, pool=request.pool)
    # With the time of the flow run in it, so a retry finds the same records.
    when = setup.run_id.removeprefix(f"sweep-{opened.name}-")
    ids = {member.label: f"{member.name}-{when}" for member in opened.members}
    pins = {} if known else setup.known_pins(ids[opened.largest.label])
    planned = known or setup.wait(
        lambda: plan_sweep(opened, setup.store, setup.home, log=setup.warn, known=pins)
    )
    opened = planned.sweep
    run = opened.largest.profile.run
    context = setup.open_context(run, planned.placement, strict=request.strict)
    setup.check_before_building(
        [item for _, item in planned.items], builds=not planned.plan.up_to_date
    )
    runs = {
        member.label: setup.continued(
            new_run(
                ids[member.label],
                member.name,
                request,
                upstream=planned.pins,
                until=opened.stage.name,
                depth=member.depth,
                overrides=member.overrides,
            )
        )
        for member in opened.members
    }
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
    sweep was stopped, and bugs of ours unchanged.
    """
    store_wait = wait_of_run(context.store, context.stop, terms=context.terms)
    work = _Work(
        sweep=sweep,
        units=units,
        context=context,
        runs=runs,
        store_wait=store_wait,
        retries=retries,
    )
    with contextlib.closing(BackgroundWriter(f"sweep {sweep.name}")) as pages:
        pages.tag_flow_run(*(run.run for run in runs.values()))
        if planned is not None:
            show_plan(pages, planned)
        try:
            with keeping_signals(context.stop):
                while True:
                    results = work.results()
                    wanted = wanted_of(sweep, results)
                    work.start([member for member in sweep.members if member.label in wanted])
                    if len(work.built) == len(work.futures):
                        break
                    work.wait()
                    if context.stop.is_set():  # a unit that was interrupted counts as failed
                        raise StageInterrupted(f"sweep {sweep.name} was stopped")
            failures = work.failures()
            for label in work.records:
                work.end_record(label)
        except BaseException as error:
            by_id = {runs[label].run: record for label, record in work.records.items()}
            stop_stages(error, context, list(work.futures.values()), by_id)
            raise
        # After failures too: the members that completed have results.
        errors = {label: str(error) for label, error in failures.items()}
        reported = report_of_sweep(sweep, results, context.store.url, errors=errors)
        spent = spent_on(filter(None, work.built.values()))
        page = write_files(context.placement.home, reported)
        get_run_logger().info(f"sweep: {page}")
        show_report(pages, reported, page, spent.lines)
    if failures:
        raise _failed(sweep, results, failures, page)
    return CompletedSweep(report=reported, page=page, spent=spent)


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
    ended: "queue.SimpleQueue[str]" = field(default_factory=lambda: queue.SimpleQueue())
    built: dict[str, Built | None] = field(default_factory=dict[str, Any])  # None: it failed

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
        """Wait until another unit has ended."""
        label = self.ended.get()
        future = self.futures[label]
        future.wait()  # it has ended: this only reads its state
        self.built[label] = future.result() if future.state.is_completed() else None

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

    def failures(self) -> dict[str, NanochatError]:
        """Return the errors of failed units by label, without units that waited for them in vain.

        Raises StageInterrupted if a unit was interrupted.
        """
        found: dict[str, NanochatError] = {}
        for label, future in self.futures.items():
            state = future.state
            if state.is_failed() or state.is_crashed() or state.is_cancelled():
                try:
                    state.result()
                except StageInterrupted:
                    raise
                except NanochatError as error:
                    found[label] = error
        return found

    def _submit(self, unit: Unit, member: Member) -> None:
        future = submit(
            unit.stage,
            self._context_of(unit, member),
            self.runs[member.label],
            {source.stage.name: self.futures[source.label] for source in unit.inputs},
            force=False,
            retries=self.retries,
            label=unit.label,
        )
        self.futures[unit.label] = future

        def note_end(_: PrefectFuture[Built]) -> None:
            self.ended.put(unit.label)

        future.add_done_callback(note_end)

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


def spent_on(artifacts: Iterable[Built]) -> Spent:
    """Sum up artifacts. One that an earlier, interrupted flow run began counts as built now."""
    found = list(artifacts)
    return Spent(
        built=_cost([built for built in found if not built.cached]),
        cached=_cost([built for built in found if built.cached]),
    )


def _cost(artifacts: list[Built]) -> Cost:
    made = [built.manifest.provenance for built in artifacts]
    gpus = (
        (s.get("ended", 0.0) - s.get("started", 0.0)) * s.get("processes", 1)
        for each in made
        for s in each.segments
        if s.get("device") == "cuda"
    )
    return Cost(
        stages=len(artifacts),
        seconds=math.fsum(each.seconds for each in made),
        gpu_hours=math.fsum(gpus) / 3600,
        dollars=math.fsum(each.dollars for each in made),
    )
