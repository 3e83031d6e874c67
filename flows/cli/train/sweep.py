"""`nanochat sweep`: try settings with several seeds, and compare them with the unchanged ones."""

import shlex
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, TypeAlias

from cyclopts import Parameter

from flows.cli.options import (
    AsJson,
    PlacementOptions,
    ProfileName,
    SettingOptions,
    WorkerOptions,
    argv_of,
    parameter_of,
)
from flows.cli.output import print_json, print_lines, print_warning, table_width
from flows.cli.recipes import read_recipe
from flows.cli.train.run import check_room, resumable
from flows.plan.upstream import pin
from flows.render.text import duration
from flows.run_request import NamedRecipe, shared
from flows.stages import PRETRAIN
from flows.sweep.grid import REDUCTION, SEEDS, STAGE, VARY, Grid, Sweep, open_sweep
from nanochat_core.errors import ConfigError

if TYPE_CHECKING:  # charts and Prefect are slow to import, and every command imports this
    from flows.sweep.build import CompletedSweep

PlanOnly: TypeAlias = Annotated[
    bool,
    Parameter(name="--plan", negative="", help="Only show what would be done, and how long."),
]


def sweep(
    profile: ProfileName,
    /,
    *,
    vary: Annotated[tuple[str, ...], parameter_of(VARY, tuple[str, ...])] = (),
    seeds: Annotated[
        str, Parameter(help="Seeds of every point, in this order; one gives no intervals.")
    ] = ",".join(map(str, SEEDS)),
    stage: Annotated[str, parameter_of(STAGE)] = PRETRAIN.name,
    reduction: Annotated[int, parameter_of(REDUCTION, int)] = 2,
    what: SettingOptions = SettingOptions(),  # noqa: B008 - frozen
    name: Annotated[
        str | None,
        Parameter(help="Name of the sweep; its runs are NAME-p1-s42 and so on."),
    ] = None,
    plan: PlanOnly = False,
    where: PlacementOptions = PlacementOptions(),  # noqa: B008 - frozen
    workers: WorkerOptions = WorkerOptions(),  # noqa: B008 - frozen
    as_json: AsJson = False,
) -> int:
    """Try settings with several seeds, and compare them with the unchanged ones.

    Each combination of the varied values is a point, and each seed of it a run. Points that rank
    behind are stopped after each seed. What remains has an interval, by pairs of equal seeds.

    After Ctrl-C, a crash or a lost machine, the same command resumes and ends with the same table.
    """
    again = ["nanochat", "sweep", profile, *argv_of(what)]
    again += [word for text in vary for word in ("--vary", text)]
    again += ["--seeds", seeds, "--stage", stage, "--reduction", str(reduction)]
    again += ["--name", name] if name else []
    profile, recipe = read_recipe(
        profile, NamedRecipe(depth=what.depth, overrides=what.overrides, run_name=name), where
    )
    grid = Grid(
        profile=profile,
        vary=vary,
        seeds=numbers_in(seeds, "--seeds", "like --seeds 42,43,44"),
        stage=stage,
        reduction=reduction,
        **shared(Grid, recipe),
    )

    command = shlex.join([*again, *where.argv, *workers.argv])
    return _run(open_sweep(grid), command, where, workers, plan=plan, as_json=as_json)


def _run(
    opened: Sweep,
    again: str,
    where: PlacementOptions,
    workers: WorkerOptions,
    *,
    plan: bool,
    as_json: bool,
) -> int:
    """Plan the sweep, and unless it is only to `plan`, call its flow; print the report.

    `again` is the command that resumes.
    """
    from flows.orchestration.local_run import check_pool_exists, ready
    from flows.sweep.plan import lines_of, pin_members, plan_sweep, plan_to_json

    workers.check()
    where.check_gpus(elsewhere=workers.pool is not None)
    # Names upstream are pinned once, for the largest model, and all members use these pins:
    # datasets that change meanwhile would make them incomparable.
    largest = opened.largest.profile
    _, pins = pin(
        largest.run, where.home_path, log=print_warning, sections=opened.sections, plan=plan
    )
    store = where.open_store()
    planned = plan_sweep(pin_members(opened, pins), store, where.work, where.placement(largest))
    if plan:
        if as_json:
            sys.stdout.write(plan_to_json(planned) + "\n")
        else:
            print_lines(lines_of(planned, width=table_width()))
        return 0
    if not planned.plan.up_to_date:  # what is built already needs no disk
        check_room(where.home_path, store)
    if workers.pool is not None:
        check_pool_exists(where.home_path, workers.pool)
    began = time.monotonic()
    with resumable(again, stages=[unit.label for unit in planned.units], stderr=as_json) as display:
        for line in [*lines_of(planned, width=table_width()), ""]:
            display.say(line)
        # `ready` points Prefect at its server before the flow is imported.
        with ready(where.home_path, display):
            from flows.orchestration.caller import call_flow
            from flows.sweep.flow import SweepRequest
            from flows.sweep.flow import sweep as flow

            request = shared(SweepRequest, opened.grid, where.resolved, workers)
            made: CompletedSweep = call_flow(flow, **request)
    if as_json:
        print_json({**made.report.tree, "cost": asdict(made.spent)})
        return 0
    built, cached = made.spent.built.stages, made.spent.cached.stages
    took = duration(time.monotonic() - began)
    print_lines(["", f"{built} stages built, {cached} cached, in {took}", ""])
    print_lines(made.report.table.lines(width=table_width()))
    print_lines(["", *made.report.sentences, "", *made.spent.lines, f"page     {made.files.page}"])
    if made.files.picture:
        print_lines([f"picture  {made.files.picture}"])
    print_lines([f"numbers  {made.files.numbers}"])
    return 0


def numbers_in(text: str, option: str, hint: str) -> tuple[int, ...]:
    """Return whole numbers with commas between. Raises ConfigError."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{option} is {text!a}, expected numbers with commas between", hint=hint
        ) from None
