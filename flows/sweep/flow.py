"""The Prefect flow `sweep`: settings varied over a grid, with several seeds."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from prefect import flow

from flows.artifacts.runs import Run
from flows.building.build import BuildContext
from flows.orchestration.caller import cancellable
from flows.orchestration.flow_setup import flow_run_name
from flows.orchestration.forms import takes
from flows.orchestration.stage_task import failing_in_a_line
from flows.run_request import shared
from flows.sweep.build import GroupRequest, GroupResult, build_group
from flows.sweep.files import GroupReport
from flows.sweep.grid import Grid, Sweep, name_of_sweep, open_sweep
from flows.sweep.members import Results
from flows.sweep.results import report_of_sweep, wanted_of


@dataclass(frozen=True, kw_only=True)
class SweepRequest(GroupRequest, Grid):
    """All parameters of the flow `sweep`."""


def _name(parameters: dict[str, Any]) -> str:
    return f"sweep-{name_of_sweep(Grid(**shared(Grid, SweepRequest(**parameters))))}"


@flow(name="sweep", flow_run_name=flow_run_name(_name), retries=0, persist_result=False)
@failing_in_a_line
@cancellable
@takes(SweepRequest)
def sweep(request: SweepRequest) -> GroupResult:
    """Train settings of a grid with several seeds, stop what ranks behind, and compare the rest."""
    opened = open_sweep(Grid(**shared(Grid, request)))
    return build_group(
        opened, request, report=partial(report_on, opened), wanted=partial(wanted_of, opened)
    )


def report_on(
    opened: Sweep, _: Mapping[str, Run], results: Results, context: BuildContext
) -> GroupReport:
    """Return the report of the sweep's results."""
    return report_of_sweep(opened, results, context.store.url)
