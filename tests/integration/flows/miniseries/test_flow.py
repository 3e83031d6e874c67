"""A series on a real server: shared stages once, a depth that fails, and what is left of it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from flows.artifacts.runs import find_run
from flows.miniseries.series import open_series
from flows.stages import Stage
from flows.sweep.members import RunGroup, units_of
from infra.prefect.records import Server
from tests.integration.flows.orchestration.test_pipeline import artifacts, task_runs
from tests.support.flows.house import make_run

pytestmark = pytest.mark.prefect

TEXT = """
def run(job):
    (job.output / "text").write_text("text")
    return {}
"""
# Of depth d it measures 3 - d / 10; a file named after the depth in HOME/broken makes it fail.
PRETRAIN = """
def run(job):
    depth = job.config["model"]["depth"]
    if (job.directory.parents[2] / "broken" / f"d{depth}").exists():
        raise ValueError("broken")
    (job.output / "depth").write_text(str(depth))
    return {}
"""
BASE_EVAL = """
def run(job):
    depth = int((job.inputs["pretrain"] / "depth").read_text())
    (job.output / "scores").write_text("scores")
    return {"val_bpb": 3 - depth / 10}
"""


def make_stages(toys: Any) -> list[Stage]:
    """text -> pretrain, which depends on depth -> base_eval"""
    text = toys.stage("text", source=TEXT)
    pretrain = toys.stage("pretrain", text, compute="gpu", source=PRETRAIN)
    pretrain = replace(pretrain, config=("seed", "numerics", "model", "pretrain"))
    return [text, pretrain, toys.stage("base_eval", pretrain, compute="gpu", source=BASE_EVAL)]


@pytest.fixture
def series() -> RunGroup:
    """Three depths of tiny."""
    return open_series("tiny", [1, 2, 3])


@pytest.fixture
def run_series(toys: Any, series: RunGroup, server: Server) -> Callable[[str], Any]:
    """Runs toy stages at these depths, as a flow run of this name; returns what it made."""
    from prefect import flow

    from flows.miniseries.flow import report_on
    from flows.sweep.build import build_units

    stages = make_stages(toys)

    def run(name: str) -> Any:
        runs = {
            member.label: replace(
                make_run(f"{member.name}-{name}"), name=member.name, depth=member.depth
            )
            for member in series.members
        }

        @flow(name="toy-series", flow_run_name=name)
        def toy_flow() -> Any:
            report = partial(report_on, series)
            units = units_of(series, stages)
            return build_units(series, units, toys.context(name), runs, report=report)

        return toy_flow()

    return run


def most_on_the_gpu(toys: Any) -> int:
    """The most GPU stages that were built at the same time."""
    at_work: set[str] = set()
    most = 0
    for name, event in toys.told:
        if "/" in name and event["kind"] == "building":
            at_work.add(name)
        elif event["kind"] == "finished":
            at_work.discard(name)
        most = max(most, len(at_work))
    return most


def test_what_is_shared_is_built_once_and_each_depth_is_a_run_of_its_own(
    toys: Any, run_series: Callable[[str], Any], series: RunGroup
) -> None:
    swept = run_series("series-whole")
    assert most_on_the_gpu(toys) == 1

    assert (swept.spent.built.stages, swept.spent.cached.stages) == (7, 0)
    assert [point["depth"] for point in swept.report.tree["points"]] == [1, 2, 3]
    assert [p["val_bpb"]["value"] for p in swept.report.tree["points"]] == [2.9, 2.8, 2.7]
    assert toys.kinds("text").count("building") == 1
    assert toys.kinds("d2 / pretrain").count("building") == 1
    records = [find_run(toys.context().store, f"{m.name}-series-whole") for m in series.members]
    assert all(record is not None and record.status == "finished" for record in records)
    assert all(record is not None and len(record.stages) == 3 for record in records)
    assert len({record.stages["text"] for record in records if record}) == 1
    assert len({record.stages["pretrain"] for record in records if record}) == 3
    assert set(task_runs("series-whole")) == {
        "text",
        *(f"d{depth} / {stage}" for depth in (1, 2, 3) for stage in ("pretrain", "base_eval")),
    }
    assert artifacts("miniseries-tiny-models")
    [picture, *_] = artifacts("miniseries-tiny-plot")
    assert picture.data.startswith("data:image/png;base64,")
    assert (toys.home / "miniseries" / "tiny" / "series.html").exists()


def test_a_depth_that_fails_takes_nothing_from_the_others_and_only_it_is_built_again(
    toys: Any, run_series: Callable[[str], Any]
) -> None:
    from nanochat_core.errors import StageError

    toys.set_broken("d2")
    with pytest.raises(
        StageError, match=r"1 of 3 depths failed, d2 \(d2 / pretrain: .*broken.*series\.html"
    ):
        run_series("series-broken")

    states = {name: state.name for name, state in task_runs("series-broken").items()}
    assert states["d2 / pretrain"] == "Failed"
    assert states["d1 / base_eval"] == states["d3 / base_eval"] == "Completed"
    store = toys.context().store
    status = {d: find_run(store, f"tiny-d{d}-series-broken") for d in (1, 2, 3)}
    assert {d: run and run.status for d, run in status.items()} == {
        1: "finished",
        2: "failed",
        3: "finished",
    }
    page = (toys.home / "miniseries" / "tiny" / "series.html").read_text()
    assert "d2 is missing: it failed" in page

    toys.set_broken("d2", False)
    swept = run_series("series-mended")
    assert (swept.spent.built.stages, swept.spent.cached.stages) == (2, 5)
    assert [point["depth"] for point in swept.report.tree["points"]] == [1, 2, 3]
    assert swept.report.tree["missing"] == ()


def test_the_form_has_depths_with_bounds(server: Server) -> None:
    from prefect.utilities.callables import parameter_schema

    from flows.miniseries.flow import miniseries

    depths = parameter_schema(miniseries).properties["depths"]
    assert depths["type"] == "array"
    assert (depths["minItems"], depths["maxItems"]) == (2, 12)
    assert (depths["items"]["minimum"], depths["items"]["maximum"]) == (1, 100)
    assert depths["default"] == [2, 3, 4, 6]


def test_equal_depths_are_refused_in_the_first_second(server: Server) -> None:
    from flows.miniseries.flow import miniseries
    from nanochat_core.errors import ConfigError

    with pytest.raises(ConfigError, match="depth 2 is given twice"):
        miniseries(profile="tiny", depths=(2, 3, 2))
