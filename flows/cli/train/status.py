"""`nanochat status`: list the latest runs, or show the progress and the logs of one."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.artifacts.names import check_stage, open_artifact, open_newest_run
from flows.artifacts.runs import Run, latest_runs, start_hint
from flows.cli.options import AsJson, PlacementOptions, Positive, StoreOptions
from flows.cli.output import age, print_result, print_unread, print_warning
from flows.cli.requests import command_of_run
from flows.cli.train.logs import print_end, print_logs, wait_for_record
from flows.cli.train.recorded import plan_again, signs_of_life, uses
from flows.evals.suite import evaluated_model
from flows.identity.ref import name_in, short
from flows.plan.dead_runs import end_dead_runs, settle
from flows.plan.plan import STATES, Plan
from flows.profiles import PROFILES
from flows.render.table import Cell, Table, facts, texts
from flows.stages import STAGES
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, ConfigError

_SHOWN = 10


def status(
    run: str | None = None,
    stage: str | None = None,
    /,
    *,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"])] = False,
    tail: Annotated[Positive | None, Parameter(name=["--tail", "-n"])] = None,
    place: StoreOptions = StoreOptions(),
    as_json: AsJson = False,
) -> int:
    """List the latest runs, or show how far one of them is, or what it logged.

    Logs of finished stages come from the store, those of unfinished stages from this machine. A
    stage that another machine is building is shown once it is finished. With --follow it exits with
    1 unless the run finishes.

    Args:
        run: A name (its newest run, finished or not), a tag or an id. Default: list runs.
        stage: Print what this stage logged, and its processes printed.
        follow: Print what all stages logged, and more until the run has ended.
        tail: Only the last lines of what was logged; default what a terminal shows at once, and all
            where the output is no terminal.
    """
    if stage is not None:
        check_stage(stage)
    is_log = stage is not None or follow or tail is not None
    if is_log and (run is None or as_json):
        raise ConfigError(
            "logs are of one run" if run is None else "logs are text, not JSON",
            hint="for example: nanochat status tiny --follow",
        )
    store, home = place.open_store(), place.home_path
    end_dead_runs(store, home)
    if run is None:
        unread: list[str] = []
        found = latest_runs(store, _SHOWN, unread=unread)
        runs = [settle(store, home, each) for each in found]
        print_unread(unread)
        rows = [
            (r.run, r.status, f"{len(r.stages)}/{len(STAGES)} stages", f"started {age(r.started)}")
            for r in runs
        ]
        table = Table(columns=texts("run", "status", "stages", "started"), rows=rows, head=False)
        lines = [table if rows else start_hint(store)]
    elif (recorded := _find(store, run, home, wait=follow)) is not None:
        runs = [settle(store, home, recorded)]
        if is_log:
            return print_logs(runs[0], stage, store, home, follow=follow, tail=tail)
        lines = list(_describe(runs[0], store, place))
    elif follow or not (submitted := signs_of_life(store, run, None, home)):
        return print_end(home, run, None)
    else:
        runs, lines = [], [f"run {run}: not started by a worker", *submitted]
    print_result(lambda: [asdict(found) for found in runs], lines, as_json=as_json)
    return 0


def _find(store: Store, run: str, home: Path, *, wait: bool) -> Run | None:
    """Return the newest run of a name or a tag, or the one with this id.

    None means that it was submitted and has no record yet; with `wait`, that it will have none.
    """
    try:
        return open_newest_run(store, run)
    except ConfigError:
        from infra.prefect.flow_runs import find_flow_runs

        # A worker writes the record of a submitted run when it starts it.
        if not (name_in(run) and find_flow_runs(home, run)):
            raise
    return wait_for_record(store, run, home) if wait else None


def _describe(run: Run, store: Store, place: StoreOptions) -> Iterator[str | Table]:
    """Yield the run's facts, each stage in its record, and what is left by today's plan."""
    where = PlacementOptions(home=place.home, store=place.store, gpus=run.gpus, place=run.place)
    home, command = place.home_path, command_of_run(run, where, use=tuple(_names(store, run)))
    is_known = run.profile in PROFILES
    yield f"run {run.run}: {run.status}"
    ended = f", ended {age(run.ended)}" if run.ended else ""
    known = ("command", command) if is_known else ("profile", run.profile)
    yield facts([known, ("started", f"{age(run.started)}{ended}")])
    planned, after = None, list[str]()
    # An imported run, or one of a removed profile, cannot be planned; nor can an evaluation's run,
    # which trains nothing.
    if is_known and evaluated_model(run) is None:
        try:
            planned = plan_again(run, store, home, log=print_warning)
        except (ArtifactError, ConfigError) as error:
            # For example an artifact was deleted; the record is still known.
            after = [f"what is left is unknown: {error}"]
    yield from ("", _stages(run, planned))
    if planned is not None and run.status != "finished":
        left = f"nothing of it is being built; resume with: {command}"
        after = signs_of_life(store, run.run, planned, home) or [left]
    yield from (["", *after] if after else [])


def _stages(run: Run, planned: Plan | None) -> Table:
    """Return a row for each stage: what the run has done, and what is left by a plan of it."""
    items = planned.stages if planned else ()
    left = {item.stage.name: (item.state, STATES[item.state], item.reason) for item in items}
    # The record wins: what this run has built counts as done although the code changed since.
    found = left | {ref.stage: ("=", "done", short(ref.fingerprint)) for ref in run.refs}
    rows = [
        (Cell(f"{sign} {stage.name}", tone=sign), Cell(state, tone=sign), how_far)
        for stage in STAGES
        if stage.name in found
        for sign, state, how_far in [found[stage.name]]
    ]
    return Table(columns=texts("stage", "state", "how far"), rows=rows, head=False)


def _names(store: Store, run: Run) -> list[str]:
    """Return the names given with --use as a command must write them now.

    A name that stands for another artifact by now, or for none, is replaced by stage/fingerprint.
    """
    names = {name: name for name in run.uses}
    for name, ref in uses(run):
        names[name] = ref.name
        with contextlib.suppress(ArtifactError, ConfigError):
            if open_artifact(store, name).ref == ref:
                names[name] = name
    return list(names.values())
