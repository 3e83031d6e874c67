"""The Prefect flows `sweep`, settings varied over a grid with several seeds, and `miniseries`."""

from dataclasses import dataclass
from typing import Annotated, Any

from prefect import flow

from flows.orchestration.caller import cancellable
from flows.orchestration.flow_setup import flow_run_name
from flows.orchestration.forms import takes
from flows.orchestration.stage_task import failing_in_a_line
from flows.run_request import Option, shared
from flows.stages import BASE_EVAL
from flows.sweep.build import CompletedSweep, GroupRequest, build_sweep
from flows.sweep.grid import DEPTH, SEEDS, Grid, name_of_sweep, open_sweep


@dataclass(frozen=True, kw_only=True)
class SweepRequest(GroupRequest, Grid):
    """All parameters of the flow `sweep`."""


@dataclass(frozen=True, kw_only=True)
class MiniseriesRequest(GroupRequest):
    """All parameters of the flow `miniseries`."""

    depths: Annotated[
        tuple[int, ...],
        Option(
            label="Depths",
            help="Different numbers of transformer layers; the first one is the base.",
            group="settings",
            rules={
                "items": {"type": "integer", "minimum": 1, "maximum": 100},
                "minItems": 2,
                "uniqueItems": True,
            },
        ),
    ] = (2, 3, 4, 6)

    @property
    def grid(self) -> Grid:
        """The sweep over these depths."""
        return Grid(
            profile=self.profile,
            vary=(f"{DEPTH}={','.join(map(str, self.depths))}",),
            seeds=SEEDS[:1],
            stage=BASE_EVAL.name,
            reduction=1,
            overrides=self.overrides,
            run_name=self.run_name,
        )


def _name(parameters: dict[str, Any]) -> str:
    return f"sweep-{name_of_sweep(Grid(**shared(Grid, SweepRequest(**parameters))))}"


@flow(name="sweep", flow_run_name=flow_run_name(_name), retries=0, persist_result=False)
@failing_in_a_line
@cancellable
@takes(SweepRequest)
def sweep(request: SweepRequest) -> CompletedSweep:
    """Train settings of a grid with several seeds, stop what ranks behind, and compare the rest."""
    return build_sweep(open_sweep(Grid(**shared(Grid, request))), request)


def _name_of_series(parameters: dict[str, Any]) -> str:
    return f"sweep-{name_of_sweep(MiniseriesRequest(**parameters).grid)}"


@flow(
    name="miniseries",
    flow_run_name=flow_run_name(_name_of_series),
    retries=0,
    persist_result=False,
)
@failing_in_a_line
@cancellable
@takes(MiniseriesRequest)
def miniseries(request: MiniseriesRequest) -> CompletedSweep:
    """Train and evaluate a profile's base model at several depths, and fit its scaling law."""
    return build_sweep(open_sweep(request.grid), request)
