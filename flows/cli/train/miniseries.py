"""`nanochat miniseries`: a sweep over depths, which fits a scaling law."""

from typing import Annotated

from cyclopts import Parameter

from flows.cli.options import (
    AsJson,
    PlacementOptions,
    ProfileName,
    SetFlag,
    parameter_of,
)
from flows.cli.train.sweep import PlanOnly, SweepOptions, numbers_in, sweep
from flows.run_request import NODES, POOL, RETRIES, RETRY, shared
from flows.stages import BASE_EVAL
from flows.sweep.grid import DEPTH
from flows.sweep.request import SEEDS


def miniseries(
    profile: ProfileName,
    /,
    *,
    depths: Annotated[str, Parameter(help="Numbers of layers, such as 2,3,4,6.")],
    seeds: Annotated[str, Parameter(help="Seeds of every depth; the law is of the means.")] = str(
        SEEDS[0]
    ),
    overrides: SetFlag = (),
    name: Annotated[
        str | None, Parameter(help="Name of the series; its runs are NAME-d4-s42 and so on.")
    ] = None,
    plan: PlanOnly = False,
    where: PlacementOptions = PlacementOptions(),  # noqa: B008 - frozen
    pool: Annotated[str | None, parameter_of(POOL)] = None,
    nodes: Annotated[int, parameter_of(NODES, int)] = 1,
    retries: Annotated[int, parameter_of(RETRY, int)] = RETRIES,
    as_json: AsJson = False,
) -> int:
    """Train a base model at several depths and draw how its loss falls with compute.

    Short for `nanochat sweep PROFILE --vary model.depth=DEPTHS --stage base_eval --reduction 1`.
    The first depth is the base. The law is fitted to all depths that were evaluated, and lists its
    doubts.

    After Ctrl-C, a crash, a lost machine or a failed depth, the same command resumes.
    """
    numbers = numbers_in(depths, "--depths", "like --depths 2,3,4,6")
    options = SweepOptions(
        **shared(SweepOptions, where),
        vary=(f"{DEPTH}={','.join(map(str, numbers))}",),
        stage=BASE_EVAL.name,
        reduction=1,
        overrides=overrides,
        run_name=name,
        pool=pool,
        nodes=nodes,
        retries=retries,
    )
    return sweep(profile, seeds=seeds, plan=plan, options=options, as_json=as_json)
