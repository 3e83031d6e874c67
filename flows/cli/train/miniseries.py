"""`nanochat miniseries`: a sweep over depths, which fits a scaling law."""

from typing import Annotated

from cyclopts import Parameter

from flows.cli.options import (
    AsJson,
    PlacementOptions,
    ProfileName,
    SettingOptions,
    WorkerOptions,
    parameter_of,
)
from flows.cli.train.sweep import PlanOnly, numbers_in, sweep
from flows.run_request import OVERRIDES
from flows.stages import BASE_EVAL
from flows.sweep.grid import DEPTH, SEEDS


def miniseries(
    profile: ProfileName,
    /,
    *,
    depths: Annotated[str, Parameter(help="Numbers of layers, such as 2,3,4,6.")],
    seeds: Annotated[str, Parameter(help="Seeds of every depth; the law is of the means.")] = str(
        SEEDS[0]
    ),
    overrides: Annotated[tuple[str, ...], parameter_of(OVERRIDES, tuple[str, ...])] = (),
    name: Annotated[
        str | None, Parameter(help="Name of the series; its runs are NAME-d4-s42 and so on.")
    ] = None,
    plan: PlanOnly = False,
    where: PlacementOptions = PlacementOptions(),  # noqa: B008 - frozen
    workers: WorkerOptions = WorkerOptions(),  # noqa: B008 - frozen
    as_json: AsJson = False,
) -> int:
    """Train a base model at several depths and draw how its loss falls with compute.

    Short for `nanochat sweep PROFILE --vary model.depth=DEPTHS --stage base_eval --reduction 1`.
    The first depth is the base. The law is fitted to all depths that were evaluated, and lists its
    doubts.

    After Ctrl-C, a crash, a lost machine or a failed depth, the same command resumes.
    """
    numbers = numbers_in(depths, "--depths", "like --depths 2,3,4,6")
    return sweep(
        profile,
        vary=(f"{DEPTH}={','.join(map(str, numbers))}",),
        seeds=seeds,
        stage=BASE_EVAL.name,
        reduction=1,
        what=SettingOptions(overrides=overrides),
        name=name,
        plan=plan,
        where=where,
        workers=workers,
        as_json=as_json,
    )
