"""`nanochat evals`: evaluate a model on a schedule, with an alert when it gets worse."""

import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from cyclopts import Parameter

from flows.cli.models import is_in_store, name_in_store
from flows.cli.options import (
    CHANGES,
    AsJson,
    PlacementOptions,
    StoreOptions,
    as_options,
    check_gpus,
    parameter_of,
)
from flows.cli.output import print_line, print_lines, print_result, print_warning
from flows.cli.train.run import resumable
from flows.evals.suite import DROP, MODEL, NIGHTLY, EvalRequest, Suite, open_suite
from flows.plan.planned import open_settings
from flows.render.table import Table, texts
from flows.render.text import duration
from flows.run_request import RunRequest, shared
from flows.stages import PRETRAIN
from infra.placement import NO_POOL, check_gpu_pool
from nanochat_core.errors import ConfigError

if TYPE_CHECKING:  # duckdb, Prefect and charts are slow to import, and every command imports this
    from deployments.registry import Wanted
    from flows.evals.flow import Evaluated

Model: TypeAlias = Annotated[str, parameter_of(MODEL)]


@as_options
@dataclass(frozen=True, kw_only=True)
class EvalOptions(EvalRequest, PlacementOptions):
    """The suite, the rule for what counts as worse, and where."""

    def open(self, model: str) -> Suite:
        """Return the suite of a model in the store.

        Raises ConfigError for wrong options before anything is started.
        """
        request = EvalRequest(model=model, **self.parameters())
        suite = open_suite(request, self.open_store(), warn=print_warning)
        if self.pool is not None:
            check_gpu_pool(self.pool)
        self.placement(open_settings(suite.run))  # raises for wrong settings
        return suite

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of the flow `nanochat-eval`, but the model."""
        found = shared(EvalRequest, self) | {"store": self.store_url, "place": self.place_settings}
        del found["model"]
        return found


def evals(
    model: Model | None = None,
    /,
    *,
    schedule: Annotated[
        bool, Parameter(negative="", help="Evaluate it from now on, by default every night.")
    ] = False,
    cron: Annotated[
        str | None, Parameter(help=f"When: minute, hour, day, month, weekday. Default {NIGHTLY}.")
    ] = None,
    timezone: Annotated[
        str | None, Parameter(help="The time zone that the hours are of. Default UTC.")
    ] = None,
    pause: Annotated[
        bool, Parameter(negative="", help="Do not start it; Prefect's pages can, or this again.")
    ] = False,
    remove: Annotated[
        bool, Parameter(negative="", help="Remove the schedule, keep its history.")
    ] = False,
    options: EvalOptions = EvalOptions(),
    as_json: AsJson = False,
) -> int:
    """Evaluate a model, now or on a schedule with an alert; without MODEL show the schedules.

    Exits with 3 when the model got worse. All results go into the same history.

    With --schedule a worker of Prefect's pool cpu does the work: the command to start one is
    printed. A model that did not change costs nothing. Given again, the schedule is changed.
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
    _check_profile(model, options)
    model = name_in_store(options, options.open_store(), model, is_foreign=True)
    if not schedule:
        return _run(model, options)
    return _schedule(model, cron or NIGHTLY, timezone or "UTC", pause, options)


def _check_profile(model: str, options: EvalOptions) -> None:
    """Raise ConfigError for settings that cannot be, before a model of gigabytes is imported."""
    if options.profile is not None:
        open_settings(RunRequest(**shared(RunRequest, options)))
    elif not is_in_store(model):
        raise ConfigError(
            f"{model} is of no run, so it has no settings of an evaluation",
            hint="use the evaluation of a profile: --profile d12",
        )


def _schedule(model: str, cron: str, timezone: str, pause: bool, options: EvalOptions) -> int:
    """Register a schedule, print what it does, and return the exit code."""
    # Before `_connect`, which may start a server: wrong options must cost nothing.
    suite = options.open(model)
    worker = _worker_command(options)  # before `_connect`, which sets PREFECT_API_URL
    _connect(options)
    from deployments.evals import apply, evaluation

    # Defaults are resolved here: the worker that evaluates has its own environment.
    wanted = evaluation(
        model,
        cron=cron,
        timezone=timezone,
        paused=pause,
        parameters={
            name: [*value] if isinstance(value, tuple) else value  # as JSON has them
            # A deployment's own default, such as that of main, must not take the pool's place.
            for name, value in {**options.parameters(), "pool": options.pool or NO_POOL}.items()
        },
        environment=_environment(options),
    )
    apply(wanted)
    command = _run_command(model, options)
    state = "paused" if pause else f"{cron} ({timezone})"
    print_lines(_scheduled(state, suite, worker, command))
    return 0


def _run(model: str, options: EvalOptions) -> int:
    """Evaluate a model now, and return the exit code."""
    if options.pool is None:
        check_gpus(options.gpus)
    suite = options.open(model)
    from flows.orchestration.local_run import check_pool_exists, ready

    if options.pool is not None:
        check_pool_exists(options.home_path, options.pool)

    began = time.monotonic()
    command = _run_command(model, options)
    with (
        resumable(command, stages=[stage.name for stage in suite.stages]) as display,
        ready(options.home_path, display, suite),
    ):
        # Imported here: `ready` first points Prefect at its server.
        from flows.evals.flow import nanochat_eval
        from flows.orchestration.caller import call_flow

        evaluated = call_flow(nanochat_eval, model=model, **options.parameters())
    print_lines(_ending(model, evaluated, took=duration(time.monotonic() - began)))
    return CHANGES if evaluated.verdict.regressed else 0


def _show_schedules(place: StoreOptions, *, as_json: bool) -> int:
    """Print which models are evaluated on a schedule, and return the exit code."""
    from infra.prefect.server import find_server, shared_server

    found: list[Wanted] = []
    # Schedules are in the server's database. A server that does not run is not started to ask.
    if shared_server(place.home_path) or find_server(place.home_path):
        _connect(place)
        from deployments.evals import read_evaluations

        found = read_evaluations()
    print_result(
        lambda: [*map(_to_tree, found)],
        [
            Table(columns=_COLUMNS, rows=[*map(_row, found)])
            if found
            else "nothing is scheduled: nanochat evals MODEL --schedule"
        ],
        as_json=as_json,
    )
    return 0


_COLUMNS = texts("model", "cron", "timezone", "state", "metric", "drop", "against")


def _remove(model: str, place: StoreOptions) -> int:
    place.open_home()
    _connect(place)
    from deployments.evals import remove

    was_there = remove(model)
    print_line(f"{model} is {'no longer' if was_there else 'not'} evaluated on a schedule")
    return 0


def _connect(place: StoreOptions) -> None:
    """Point Prefect at its server, started if needed."""
    from flows.orchestration.local_run import connect

    connect(place.home_path, print_line)


def _environment(where: PlacementOptions) -> dict[str, str]:
    """Return environment variables of the evaluating process."""
    from infra.prefect.server import shared_server

    # Workers of a local server share this machine and its home. Those of a shared server may be on
    # other machines, where this path means nothing.
    return {} if shared_server(where.home_path) else {"NANOCHAT_HOME": str(where.home_path)}


def _to_tree(found: "Wanted") -> dict[str, Any]:
    parameters, schedule = {**found.parameters}, found.schedule
    assert schedule is not None
    return {
        "model": parameters.pop("model"),
        "cron": schedule.cron,
        "timezone": schedule.timezone or "UTC",
        "paused": found.paused,
        "parameters": parameters,
    }


def _row(found: "Wanted") -> tuple[str, ...]:
    tree = _to_tree(found)
    facts = tree["parameters"]
    return (
        tree["model"],
        tree["cron"],
        tree["timezone"],
        "paused" if found.paused else "on",
        str(facts.get("metric") or usual_metric(tree["model"])),
        f"{facts.get('drop', DROP):g}",
        str(facts.get("against", "previous")),
    )


def usual_metric(model: str) -> str:
    """Return the metric that is compared where none is chosen; a bare name is a chat model's."""
    is_base = model.replace("/", "@").startswith(f"{PRETRAIN.name}@")
    return "core or val_bpb" if is_base else "chatcore"


def _run_command(model: str, options: EvalOptions) -> str:
    """Return the command that evaluates the model now."""
    return shlex.join(["nanochat", "evals", model, *options.argv])


def _worker_command(where: PlacementOptions) -> str:
    """Return the command that starts a worker for the schedule."""
    from infra.prefect.server import shared_server

    # Not `prefect worker start`: it does not know the password of the home's server.
    words = ["nanochat", "up", "--pool", "cpu", *StoreOptions(home=where.home).argv]
    shared = shared_server(where.home_path)
    return shlex.join([*([f"PREFECT_API_URL={shared}"] if shared else []), *words])


def _scheduled(state: str, suite: Suite, worker: str, command: str) -> Iterator[str]:
    """Yield the lines printed after a schedule is made."""
    yield f"{suite.request.model} is evaluated by {suite.stage.name}: {state}"
    yield f"model   {suite.model.name}; looked up again each time"
    yield f"worker  {worker}"
    yield f"at once {command}"


def _ending(model: str, evaluated: "Evaluated", *, took: str) -> Iterator[str]:
    yield ""
    how = "cached" if evaluated.evaluation.cached else "built"
    yield f"{evaluated.evaluation.manifest.name} {how}, in {took}"
    yield f"{model}: {evaluated.verdict.text}"
