"""The Prefect flow `sweep`: settings varied over a grid, with several seeds."""

from flows.orchestration.flow_setup import run_flow
from flows.sweep.build import CompletedSweep, build_sweep
from flows.sweep.grid import name_of_sweep
from flows.sweep.request import SweepRequest


@run_flow("sweep", SweepRequest, name_of=lambda request: f"sweep-{name_of_sweep(request)}")
def sweep(request: SweepRequest) -> CompletedSweep:
    """Train settings of a grid with several seeds, stop what ranks behind, and compare the rest."""
    return build_sweep(request)
