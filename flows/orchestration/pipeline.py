"""The Prefect flow `nanochat`: builds every stage of the table, each once its inputs exist."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prefect.futures import PrefectFuture, wait
from prefect.logging import get_run_logger

from flows.artifacts.cache import fetch
from flows.artifacts.runs import Run, RunRecord, new_run
from flows.building.build import BuildContext, Built, reserve_found, reuse
from flows.identity.manifest import Manifest
from flows.leases.outage import StoreWait
from flows.orchestration.flow_setup import (
    FlowSetup,
    note_progress,
    open_flow,
    planned_by_caller,
    wait_of_run,
    warn,
)
from flows.orchestration.forms import run_flow
from flows.orchestration.run_page import show_artifacts, show_plan, show_report
from flows.orchestration.stage_page import BackgroundWriter
from flows.orchestration.stage_runs import keeping_signals, stop_stages
from flows.orchestration.stage_task import submit
from flows.overrides import name_of, open_name
from flows.plan.plan import Plan
from flows.plan.planned import Planned, plan_run
from flows.run_request import RETRIES, RunRequest
from flows.stages import REPORT, Stage, stages_to_redo


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The results of a run that completed."""

    run: Run
    stages: dict[str, Built]


@run_flow("nanochat", RunRequest, name_of=lambda request: name_of(request.resolved))
def nanochat(request: RunRequest) -> Outcome:
    """Train, evaluate and report a model. Stages that are up to date are reused, so a failed or
    crashed run is resumed by running it again.
    """
    return run(request)


def run(
    request: RunRequest,
    *,
    setup: FlowSetup | None = None,
    uses: Sequence[str] | None = None,
    more: Sequence[Stage] = (),
    given: Mapping[str, Manifest] | None = None,
) -> Outcome:
    """Plan, record and build a requested run. Inside a flow only.

    `setup` is of a flow that has opened itself already; `uses` are recorded in place of the names
    of the given artifacts. `more` stages, which no plan knows, are built too; of their inputs
    `given` has artifacts by the stage's name. Raises what `plan_run` and `run_pipeline` raise.
    """
    # The record and the requests for stages have what the short fields stand for.
    request = request.resolved
    setup = setup or open_flow(store=request.store)
    name = setup.wait(lambda: open_name(setup.store, request))
    earlier = setup.find_earlier(setup.run_id)
    planned = planned_by_caller(request, Planned) or setup.wait(
        lambda: plan_run(
            request,
            setup.store,
            setup.caller.home,
            log=warn,
            known=earlier.upstream if earlier else {},
        )
    )
    context = setup.open_context(planned.profile.run, planned.placement, strict=request.strict)
    note_progress(planned.plan.stages)
    if more or not planned.plan.up_to_date:
        setup.wait(setup.store.check_conditions)  # for leases
    record = new_run(
        setup.run_id,
        name,
        request,
        upstream=planned.pins,
        uses=tuple(request.use if uses is None else uses),
    )
    stages = [item.stage for item in planned.plan.stages]
    return run_pipeline(
        [*stages, *more],
        context,
        replace(record, started=earlier.started) if earlier else record,
        plan=planned.plan,
        redo=stages_to_redo(stages, force=request.force, from_stage=request.from_stage),
        pinned={**planned.pinned, **(given or {})},
        retries=request.retries,
    )


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
    pages = BackgroundWriter(run.name)
    pages.tag_flow_run(run.run)
    if plan is not None:
        show_plan(pages, plan)
    futures: dict[str, PrefectFuture[Built]] = {}
    there: dict[str, Built] = {}
    try:
        with keeping_signals(context.stop):
            there |= {name: _reused(context, m) for name, m in (pinned or {}).items()}
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
        show_artifacts(pages, run, built, context.store.url)
        if (report := built.get(REPORT.name)) is not None:
            _show_report(context, report, pages, store_wait)
    except BaseException as error:
        if not stop_stages(error, context, list(futures.values()), {run.run: record}):
            show_artifacts(pages, run, there | _finished(futures), context.store.url)
        raise
    finally:
        pages.close()
    fingerprints = {name: b.manifest.fingerprint for name, b in built.items()}
    return Outcome(
        run=store_wait(lambda: record.end("finished", fingerprints)),
        stages=built,
    )


def _reused(context: BuildContext, manifest: Manifest) -> Built:
    """Return an artifact that is used for its stage. Raises what `reserve_found` raises."""
    context.wait_for_store(manifest.stage)(lambda: reserve_found(context, [manifest]))
    return reuse(context, manifest)


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
    context: BuildContext, built: Built, pages: BackgroundWriter, store_wait: StoreWait
) -> None:
    """Show the report card in Prefect, and log the path of its page."""
    with context.open_cache() as cache:
        files = store_wait(lambda: fetch(context.store, built.manifest, cache)) / "files"
        text = files / "report.md"
        if text.exists():
            show_report(pages, text.read_text(encoding="utf-8"))
        get_run_logger().info(f"report card: {files / 'report.html'}")
