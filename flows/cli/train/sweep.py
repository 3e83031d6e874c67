"""`nanochat sweep`: try settings with several seeds, and compare them with the unchanged ones."""

import shlex
import time
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from cyclopts import Parameter

from flows.cli.options import AsJson, PlacementOptions, ProfileName, as_options, check_workers
from flows.cli.output import print_json, print_lines, print_result, print_warning
from flows.cli.requests import read_request
from flows.cli.train.run import check_room, resumable
from flows.render.text import duration
from flows.run_request import shared
from flows.stages import BASE_EVAL
from flows.sweep.grid import open_sweep
from flows.sweep.request import DEPTH, SEEDS, SweepRequest
from nanochat_core.errors import ConfigError


@as_options
@dataclass(frozen=True, kw_only=True)
class SweepOptions(SweepRequest, PlacementOptions):
    """Everything that a sweep can be given, but its seeds."""


def sweep(
    profile: ProfileName,
    /,
    *,
    depths: str | None = None,
    seeds: str | None = None,
    plan: Annotated[bool, Parameter(name="--plan")] = False,
    options: SweepOptions = SweepOptions(),
    as_json: AsJson = False,
) -> None:
    """Try settings with several seeds, and compare them with the unchanged ones.

    Each combination of the varied values is a point, and each seed of it a run. Points that rank
    behind are stopped after each seed. What remains has an interval, by pairs of equal seeds.

    A miniseries, with --depths, trains a base model at several depths. The first one is the base.
    The law by which loss falls with compute is fitted to all that were evaluated; it lists its
    doubts.

    After Ctrl-C, a crash or a lost machine, the same command resumes and ends with the same table.

    Args:
        depths: Numbers of layers, such as 2,3,4,6: a miniseries. Short for --vary
            model.depth=DEPTHS --stage base_eval --reduction 1, by default with one seed.
        seeds: Seeds of every point, in this order; one gives no intervals. Default 42,43,44.
        plan: Only show what would be done, and how long.
    """
    from flows.orchestration.local_run import check_pool_exists, ready
    from flows.sweep.plan import lines_of, plan_sweep, plan_tree

    if depths is not None:
        options = _over_depths(options, depths)
    seeds = seeds or ",".join(map(str, SEEDS if depths is None else SEEDS[:1]))
    again = shlex.join(["nanochat", "sweep", profile, "--seeds", seeds, *options.argv])
    given = shared(SweepRequest, options, read_request(profile, options))
    given["seeds"] = _numbers_in(seeds)
    request = SweepRequest(**given)
    check_workers(request)
    opened, home = open_sweep(request), options.home_path
    store = options.open_store()
    planned = plan_sweep(opened, store, home, log=print_warning, will_run=not plan)
    options.warn_of(planned.placement)
    if plan:
        print_result(lambda: plan_tree(planned), lines_of(planned), as_json=as_json)
        return
    if not planned.plan.up_to_date:  # what is built already needs no disk
        check_room(home, store)
    if request.pool is not None:
        check_pool_exists(home, request.pool)
    began = time.monotonic()
    with resumable(again, stages=[unit.label for unit in planned.units], stderr=as_json) as display:
        display.say(f"sweep {opened.name}: {lines_of(planned)[-1]}")
        # `ready` points Prefect at its server before the flow is imported.
        with ready(home, display, planned):
            from flows.orchestration.caller import call_flow
            from flows.sweep.build import sweep as flow

            made = call_flow(flow, **given)
    if as_json:
        cost = {"built": asdict(made.built), "cached": asdict(made.cached)}
        print_json({**made.report.tree, "cost": cost})
        return
    took = duration(time.monotonic() - began)
    files = [f"page     {made.page}", f"numbers  {made.page.with_suffix('.json')}"]
    print_lines(["", f"finished in {took}", "", made.report.table])
    print_lines(["", *made.report.sentences, "", *made.cost_lines, *files])


def _over_depths(options: SweepOptions, depths: str) -> SweepOptions:
    """Return the options of a miniseries. Raises ConfigError if they are of another sweep."""
    varied = f"{DEPTH}={depths.replace(' ', '')}"
    if (options.stage, options.reduction) != (SweepRequest.stage, SweepRequest.reduction):
        raise ConfigError(
            "--depths has a stage and a reduction of its own",
            hint=f"leave them out, or give --vary {varied}",
        )
    return replace(options, vary=(*options.vary, varied), stage=BASE_EVAL.name, reduction=1)


def _numbers_in(seeds: str) -> tuple[int, ...]:
    """Return whole numbers with commas between. Raises ConfigError."""
    try:
        return tuple(int(word) for word in seeds.split(","))
    except ValueError:
        raise ConfigError(
            f"--seeds is {seeds!a}, expected numbers with commas between",
            hint="like --seeds 42,43,44",
        ) from None
