"""A sweep over depths on a real server: shared stages once, and a depth that fails."""

from dataclasses import replace
from typing import Any

import pytest

from flows.artifacts.runs import find_run
from flows.stages import Stage
from flows.sweep.grid import open_sweep
from flows.sweep.request import SweepRequest
from nanochat_core.errors import ConfigError, StageError
from tests.integration.flows.orchestration.test_pipeline import task_runs
from tests.support.flows.toy_sweep import run_sweep

pytestmark = pytest.mark.prefect

DEPTHS = (1, 2, 3)
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


def run_series(toys: Any, name: str) -> Any:
    """Run text -> pretrain, which depends on depth -> base_eval, at three depths of tiny."""
    text = toys.stage("text", source=TEXT)
    pretrain = toys.stage("pretrain", text, compute="gpu", source=PRETRAIN)
    pretrain = replace(pretrain, config=("numerics", "model", "pretrain"))
    stages: list[Stage] = [text, pretrain]
    stages.append(toys.stage("base_eval", pretrain, compute="gpu", source=BASE_EVAL))
    vary = f"model.depth={','.join(map(str, DEPTHS))}"
    grid = SweepRequest(vary=(vary,), seeds=(42,), stage="base_eval", reduction=1, run_name="tiny")
    return run_sweep(toys, open_sweep(grid), name, stages)


def test_a_depth_that_fails_takes_nothing_from_the_others_and_only_it_is_built_again(toys, server):
    toys.set_broken("d2")
    with pytest.raises(
        StageError, match=r"1 of 3 runs failed, d2 s42 \(d2 / pretrain: .*broken.*sweep\.html"
    ):
        run_series(toys, "series-broken")

    states = {name: state.name for name, state in task_runs("series-broken").items()}
    assert states["d2 / pretrain"] == "Failed"
    assert states["d1 / base_eval"] == states["d3 / base_eval"] == "Completed"
    store = toys.context().store
    status = {d: find_run(store, f"tiny-d{d}-s42-series-broken") for d in DEPTHS}
    assert {d: run and run.status for d, run in status.items()} == {
        1: "finished",
        2: "failed",
        3: "finished",
    }
    page = (toys.home / "sweep" / "tiny" / "sweep.html").read_text()
    (line,) = (line for line in page.splitlines() if "<li>d2 / pretrain: " in line)
    assert "broken" in line

    toys.set_broken("d2", False)
    swept = run_series(toys, "series-mended")
    assert (swept.built.stages, swept.cached.stages) == (2, 5)
    assert toys.kinds("text").count("building") == 1
    assert swept.report.tree["series"]["losses"] == {1: 2.9, 2: 2.8, 3: 2.7}
    assert swept.report.tree["errors"] == {}


def test_the_flow_refuses_a_depth_at_once(server):
    from flows.sweep.build import sweep

    with pytest.raises(ConfigError, match="depth 0 is not between 1 and 100"):
        sweep(profile="tiny", vary=("model.depth=0,2",), stage="base_eval")
