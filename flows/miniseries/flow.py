"""The Prefect flow `miniseries`: one profile at several depths, and the law of their losses.

All depths are submitted at once, and stages that they share are built once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from prefect import flow

from flows.artifacts.runs import Run
from flows.building.build import BuildContext
from flows.miniseries.findings import analyse
from flows.miniseries.report import report_of
from flows.miniseries.series import LEAST_DEPTHS, MOST_DEPTHS, open_series
from flows.orchestration.caller import cancellable
from flows.orchestration.flow_setup import flow_run_name
from flows.orchestration.forms import takes
from flows.orchestration.stage_task import failing_in_a_line
from flows.overrides import default_name
from flows.run_request import RUN_NAME, Option
from flows.sweep.build import GroupRequest, GroupResult, build_group
from flows.sweep.files import GroupReport
from flows.sweep.members import Results, RunGroup

DEPTHS = (2, 3, 4, 6)


@dataclass(frozen=True, kw_only=True)
class MiniseriesRequest(GroupRequest):
    """All parameters of the flow `miniseries`."""

    depths: Annotated[
        tuple[int, ...],
        Option(
            label="Depths",
            help="Two to twelve different numbers of transformer layers.",
            group="settings",
            rules={
                "items": {"type": "integer", "minimum": 1, "maximum": 100},
                "minItems": LEAST_DEPTHS,
                "maxItems": MOST_DEPTHS,
                "uniqueItems": True,
            },
        ),
    ] = DEPTHS
    run_name: Annotated[
        str | None,
        replace(
            RUN_NAME,
            label="Name of the series",
            help="Name of the series, whose runs are NAME-d4 and so on; by default the profile's.",
        ),
    ] = None


def _name(parameters: dict[str, Any]) -> str:
    name: str | None = parameters["run_name"]
    own = default_name(parameters["profile"], overrides=parameters["overrides"])
    return f"miniseries-{name or own}"


@flow(
    name="miniseries",
    flow_run_name=flow_run_name(_name),
    retries=0,
    persist_result=False,
)
@failing_in_a_line
@cancellable
@takes(MiniseriesRequest)
def miniseries(request: MiniseriesRequest) -> GroupResult:
    """Train and evaluate a profile's base model at several depths, and fit its scaling law."""
    series = open_series(
        request.profile, request.depths, overrides=request.overrides, name=request.run_name
    )
    return build_group(series, request, report=partial(report_on, series))


def report_on(
    series: RunGroup, runs: Mapping[str, Run], _: Results, context: BuildContext
) -> GroupReport:
    """Return the findings of the series' runs, by member label."""
    by_depth = {member.depth: runs[member.label] for member in series.members}
    findings = analyse(context.store, by_depth, name=series.name, profile=series.profile)
    return report_of(findings)
