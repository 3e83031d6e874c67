"""`nanochat evals`: evaluate a model on a schedule, with an alert when it gets worse."""

import json
import shlex
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from cyclopts import Parameter

from flows.artifacts.names import find_directory
from flows.cli.models import name_in_store
from flows.cli.options import (
    CHANGES,
    AsJson,
    PlacementOptions,
    StoreOptions,
    as_options,
    check_workers,
    parameter_of,
)
from flows.cli.output import print_line, print_lines, print_result, print_warning
from flows.cli.train.run import resumable
from flows.evals.suite import DROP, MODEL, NIGHTLY, EvalRequest, Suite, open_suite
from flows.orchestration.local_run import check_pool_exists, connect, ready
from flows.plan.planned import open_settings, plan_run
from flows.render.table import Table, texts
from flows.render.text import duration
from flows.run_request import RunRequest, shared
from infra.placement import NO_POOL
from nanochat_core.errors import ConfigError
from nanochat_core.interop.hub_files import is_on_hub

if TYPE_CHECKING:  # duckdb, Prefect and charts are slow to import, and every command imports this
    from deployments.registry import Wanted

Model: TypeAlias = Annotated[str, parameter_of(MODEL)]


@as_options
@dataclass(frozen=True, kw_only=True)
class EvalOptions(EvalRequest, PlacementOptions):
    """The suite, the rule for what counts as worse, and where."""


def evals(
    model: Model | None = None,
    /,
    *,
    schedule: bool = False,
    cron: Annotated[
        str | None, Parameter(help=f"When: minute, hour, day, month, weekday. Default {NIGHTLY}.")
    ] = None,
    timezone: str | None = None,
    pause: bool = False,
    remove: bool = False,
    options: EvalOptions = EvalOptions(),
    as_json: AsJson = False,
) -> int | None:
    """Evaluate a model, now or on a schedule with an alert; without MODEL show the schedules.

    Exits with 3 when the model got worse. All results go into the same history.

    With --schedule a worker of Prefect's pool cpu does the work: the command to start one is
    printed. A model that did not change costs nothing. Given again, the schedule is changed.

    Args:
        schedule: Evaluate it from now on, by default every night.
        timezone: The time zone that the hours are of. Default UTC.
        pause: Do not start it; Prefect's pages can, or this again.
        remove: Remove the schedule, keep its history.
    """
    if not schedule and (cron or timezone or pause):
        raise ConfigError("--cron, --timezone and --pause are of a schedule", hint="add --schedule")
    if model is None and not (schedule or remove):
        return _show_schedules(options, as_json=as_json)
    if as_json:
        raise ConfigError("--json is of the list of schedules", hint="leave MODEL out")
    model = model or EvalRequest.model
    # Before anything is looked up: the model of a schedule to be removed may be gone.
    if remove:
        return _remove(model, options)
    # Settings that cannot be are refused before a model of gigabytes is imported.
    if options.profile is not None:
        open_settings(RunRequest(**shared(RunRequest, options)))
    elif is_on_hub(model) or find_directory(model):
        raise ConfigError(
            f"{model} is of no run, so it has no settings of an evaluation",
            hint="use the evaluation of a profile: --profile d12",
        )
    model = name_in_store(options, options.open_store(), model, is_foreign=True)
    given: dict[str, Any] = shared(EvalRequest, options) | {"model": model}
    given |= {"store": options.store_url, "place": options.place_settings}
    # Before a server may be started: wrong options must cost nothing.
    store, home = options.open_store(), options.home_path
    suite = open_suite(EvalRequest(**given), store, warn=print_warning)
    check_workers(suite.run, is_here=not schedule)
    # Raises for wrong settings. What the plan warns of, the suite has warned of, or the run does.
    planned = plan_run(suite.run, store, home, log=lambda text: None, will_run=False)
    options.warn_of(planned.placement)
    command = shlex.join(["nanochat", "evals", model, *options.argv])
    if not schedule:
        return _run(suite, command, options)
    return _schedule(suite, command, options, cron=cron or NIGHTLY, zone=timezone, paused=pause)


def _schedule(
    suite: Suite, command: str, options: EvalOptions, *, cron: str, zone: str | None, paused: bool
) -> None:
    """Register a schedule, and print what it does."""
    from infra.prefect.server import shared_server

    # Before `connect`, which sets PREFECT_API_URL.
    server = shared_server(options.home_path)
    connect(options.home_path, print_line)
    from deployments.evals import apply, evaluation, schedule_of

    model, zone = suite.request.model, zone or "UTC"
    # A deployment's own default, such as that of main, must not take the pool's place.
    request = replace(suite.request, pool=options.pool or NO_POOL)
    wanted = evaluation(
        # As JSON. Defaults are resolved: the worker that evaluates has its own environment.
        json.loads(json.dumps(asdict(request))),
        schedule=schedule_of(cron, zone),
        paused=paused,
        # Workers of a local server share this machine and its home. Those of a shared server may be
        # on other machines, where this path means nothing.
        environment={} if server else {"NANOCHAT_HOME": str(options.home_path)},
    )
    apply(wanted)
    # Not `prefect worker start`: it does not know the password of the home's server.
    worker = ["nanochat", "up", "--pool", "cpu", *StoreOptions(home=options.home).argv]
    words = [f"PREFECT_API_URL={server}", *worker] if server else worker
    state = "paused" if paused else f"{cron} ({zone})"
    print_lines(
        [
            f"{model} is evaluated by {suite.stage.name}: {state}",
            f"model   {suite.model.name}; looked up again each time",
            f"worker  {shlex.join(words)}",
            f"at once {command}",
        ]
    )


def _run(suite: Suite, command: str, options: EvalOptions) -> int:
    """Evaluate a model now, and return the exit code."""
    if options.pool is not None:
        check_pool_exists(options.home_path, options.pool)
    began = time.monotonic()
    with (
        resumable(command, stages=[s.name for s in (*suite.stage.inputs, suite.stage)]) as display,
        ready(options.home_path, display, suite),
    ):
        # Imported here: `ready` first points Prefect at its server.
        from flows.evals.flow import nanochat_eval
        from flows.orchestration.caller import call_flow

        made, verdict = call_flow(nanochat_eval, **asdict(suite.request))
    how, took = "cached" if made.cached else "built", duration(time.monotonic() - began)
    done = f"{made.manifest.name} {how}, in {took}"
    print_lines(["", done, f"{suite.request.model}: {verdict.text}"])
    return CHANGES if verdict.regressed else 0


def _show_schedules(place: StoreOptions, *, as_json: bool) -> None:
    """Print which models are evaluated on a schedule."""
    from infra.prefect.server import find_server, shared_server

    found: list[Wanted] = []
    # Schedules are in the server's database. A server that does not run is not started to ask.
    if shared_server(place.home_path) or find_server(place.home_path):
        connect(place.home_path, print_line)
        from deployments.evals import read_evaluations

        found = read_evaluations()
    rows = [*map(_row, found)]
    lines: list[str | Table] = ["nothing is scheduled: nanochat evals MODEL --schedule"]
    if rows:
        cells = [[cell or "chatcore, core or val_bpb" for cell in row.values()] for row in rows]
        lines = [Table(columns=texts(*rows[0]), rows=cells)]
    print_result(lambda: rows, lines, as_json=as_json)


def _remove(model: str, place: StoreOptions) -> None:
    place.open_home()
    connect(place.home_path, print_line)
    from deployments.evals import remove

    was_there = remove(model)
    print_line(f"{model} is {'no longer' if was_there else 'not'} evaluated on a schedule")


def _row(found: "Wanted") -> dict[str, str | None]:
    rule, schedule = found.parameters, found.schedule
    assert schedule is not None
    return {
        "model": rule["model"],
        "cron": schedule.cron,
        "timezone": schedule.timezone or "UTC",
        "state": "paused" if found.paused else "on",
        "metric": rule.get("metric"),  # None: the first of three that was measured
        "drop": f"{rule.get('drop', DROP):g}",
        "against": rule.get("against", "previous"),
    }
