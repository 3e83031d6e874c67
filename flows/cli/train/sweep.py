"""`nanochat sweep`: try settings with several seeds, and compare them with the unchanged ones.

What it shares with `nanochat miniseries` stands here too.
"""

import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

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
from flows.sweep.grid import REDUCTION, SEEDS, STAGE, VARY, Grid, open_sweep
from flows.sweep.members import RunGroup, pin_members
from nanochat_core.errors import ConfigError

if TYPE_CHECKING:  # charts and Prefect are slow to import, and every command imports this
    from flows.sweep.cost import Spent
    from flows.sweep.files import Files, GroupReport

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

    def start() -> Any:
        from flows.orchestration.caller import call_flow
        from flows.sweep.flow import SweepRequest
        from flows.sweep.flow import sweep as flow

        return call_flow(flow, **shared(SweepRequest, grid, where.resolved, workers))

    command = shlex.join([*again, *where.argv, *workers.argv])
    return run_group(open_sweep(grid), command, start, where, workers, plan=plan, as_json=as_json)


def run_group(
    group: RunGroup,
    again: str,
    start: Callable[[], Any],
    where: PlacementOptions,
    workers: WorkerOptions,
    *,
    plan: bool,
    as_json: bool,
) -> int:
    """Plan the runs of a group, and unless it is only to `plan`, call its flow; print the report.

    `again` is the command that resumes; `start` imports and calls the flow, which returns a
    `flows.sweep.build.GroupResult`.
    """
    from flows.orchestration.local_run import check_pool_exists, ready
    from flows.sweep.plan import lines_of, plan_group, plan_to_json

    workers.check()
    where.check_gpus(elsewhere=workers.pool is not None)
    # Names upstream are pinned once, for the largest model, and all members use these pins:
    # datasets that change meanwhile would make them incomparable.
    largest = group.largest.profile
    _, pins = pin(
        largest.run, where.home_path, log=print_warning, sections=group.sections, plan=plan
    )
    store = where.open_store()
    planned = plan_group(pin_members(group, pins), store, where.work, where.placement(largest))
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
        # `start` imports the flow: `ready` first points Prefect at its server.
        with ready(where.home_path, display):
            made = start()
    if not as_json:
        built, cached = made.spent.built.stages, made.spent.cached.stages
        took = duration(time.monotonic() - began)
        print_lines(["", f"{built} stages built, {cached} cached, in {took}", ""])
    print_report(made.report, made.files, spent=made.spent, as_json=as_json)
    return 0


def print_report(
    report: "GroupReport", files: "Files", *, spent: "Spent | None" = None, as_json: bool
) -> None:
    """Print the table, the sentences about it, the cost and the paths of the files, or JSON."""
    if as_json:
        print_json({**report.tree, **({"cost": asdict(spent)} if spent else {})})
        return
    print_lines(report.lines(width=table_width()))
    print_lines(["", *(spent.lines if spent else ()), f"page     {files.page}"])
    if files.picture:
        print_lines([f"picture  {files.picture}"])
    print_lines([f"numbers  {files.numbers}"])


def numbers_in(text: str, option: str, hint: str) -> tuple[int, ...]:
    """Return whole numbers with commas between. Raises ConfigError."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{option} is {text!a}, expected numbers with commas between", hint=hint
        ) from None
