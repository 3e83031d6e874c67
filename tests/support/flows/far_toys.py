"""What a real worker runs in the tests of orders: the flow `one-stage` with toys for stages.

The environment variable TOYS names the test's directory: the toys' repository and the caller's home
are in it, and the worker's own home, so that caller and worker share the store and nothing else.
"""

import os
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import flows.building.stage_request
import flows.orchestration.one_stage
import infra.retry
from flows.building.context import BuildContext, Watch
from flows.building.stage_request import StageRequest
from flows.identity.manifest import Manifest
from flows.orchestration.flow_setup import run_flow
from flows.orchestration.one_stage import one_stage
from flows.orchestration.pipeline import run_pipeline
from flows.run_request import GpuPool, Gpus, Option, Retries
from flows.stages import Stage
from tests.support.flows.fixtures import Toys
from tests.support.flows.house import make_run

__all__ = ["one_stage", "toy_flow"]

DIRECTORY = "TOYS"
OTHER_CODE = "TOYS_OTHER_CODE"
TABLE = "table.pickle"  # the stages of a test, in its directory


def toys_of(directory: Path, *, home: str = "home") -> Toys:
    """The toys of a test, and a home in its directory."""
    (directory / home).mkdir(exist_ok=True)
    return Toys(root=directory / "root", home=directory / home)


def read_table(directory: Path) -> list[Stage]:
    """The stages of the test."""
    return pickle.loads((directory / TABLE).read_bytes())


def write_table(directory: Path, stages: list[Stage]) -> None:
    """Write the stages for workers."""
    (directory / TABLE).write_bytes(pickle.dumps(stages))


def context_of(directory: Path, run_id: str, *, home: str, gpus: int = 0) -> BuildContext:
    """Where toys are built: in a home of the test's directory, from its one store."""
    context = toys_of(directory, home=home).context(run_id)
    placement = replace(
        context.placement,
        store=(directory / "home" / "store").as_uri(),
        gpus=gpus,
        resources=replace(context.placement.resources, device="cuda" if gpus else "cpu"),
    )
    return replace(context, placement=placement, store=toys_of(directory).context().store)


def _open_order(
    request: StageRequest, *, watch: Watch
) -> tuple[Stage, BuildContext, Mapping[str, Manifest]]:
    directory = Path(os.environ[DIRECTORY])
    context = context_of(directory, request.run, home="far", gpus=request.gpus or 0)
    if OTHER_CODE in os.environ:
        context = replace(context, root=_changed(context.root, directory / "changed"))
    found = [flows.building.stage_request._input(context, name) for name in request.inputs]
    return _stage_of(request), replace(context, watch=watch), {m.stage: m for m in found}


def _changed(root: Path, copy: Path) -> Path:
    """The repository with something else in each stage."""
    shutil.copytree(root, copy)
    for path in copy.glob("tasks/toy_*.py"):
        path.write_text(path.read_text() + "\nCHANGED = True\n")
    return copy


def _stage_of(request: StageRequest) -> Stage:
    table = read_table(Path(os.environ[DIRECTORY]))
    return {stage.name: stage for stage in table}[request.stage]


if DIRECTORY in os.environ:  # in a worker; the test itself imports this module too
    patched: Any = (flows.building.stage_request, flows.orchestration.one_stage)
    for module in patched:
        module.open_request = _open_order
        module.stage_of = _stage_of
    infra.retry.FIRST_PAUSE = 0.5


def _option(label: str) -> Option:
    return Option(label=label, help=label, group="run")


@dataclass(frozen=True, kw_only=True)
class ToyRequest:
    """A run of the test's table of stages."""

    run_id: Annotated[str, _option("Run")]
    pool: GpuPool = None
    retries: Retries = 3
    gpus: Gpus = 0


@run_flow("toys", ToyRequest, name_of=lambda request: request.run_id)
def toy_flow(request: ToyRequest) -> Any:
    """Run the test's table of stages, those for GPUs on a pool."""
    directory, gpus = Path(os.environ[DIRECTORY]), request.gpus or 0
    context = context_of(directory, request.run_id, home="home", gpus=gpus)
    context = replace(context, placement=replace(context.placement, pool=request.pool))
    run = replace(make_run(request.run_id), gpus=gpus)
    run_pipeline(read_table(directory), context, run, retries=request.retries)
