"""A sweep on a real server: what is built, what is stopped, and the same table after kills."""

import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts.runs import find_run
from infra.prefect.server import Server
from nanochat_core.errors import StageError
from tests.integration.flows.orchestration.test_pipeline import artifacts, task_runs
from tests.support.flows.toy_sweep import run_process, run_sweep, toy_sweep

pytestmark = pytest.mark.prefect

VARY = "optimizer.muon_lr=0.01,0.028,0.05,0.5"
# Of four points two get the second seed and one the third: 7 runs, 3 of the base, 3 texts.
BUILT = 13


def files_of(home: Path) -> dict[str, bytes]:
    """The files of the sweep, without the address of their store."""
    paths = sorted((home / "sweep" / "toy").iterdir())
    return {path.name: path.read_bytes().replace(str(home).encode(), b"") for path in paths}


def most_on_the_gpu(toys: Any) -> int:
    """Return the most GPU stages that were built at the same time."""
    kinds = [event["kind"] for name, event in toys.events if name.endswith("pretrain")]
    changes = ((kind == "building") - (kind == "finished") for kind in kinds)
    return max(itertools.accumulate(changes))


@pytest.fixture(scope="module")
def whole(
    make_toys: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory, server: Server
) -> tuple[Any, Any]:
    """Toys whose sweep ended undisturbed, and what it made."""
    toys = make_toys(tmp_path_factory.mktemp("whole"))
    return toys, run_sweep(toys, toy_sweep(VARY), "sweep-whole")


def test_what_ranks_behind_is_stopped_and_what_is_shared_is_built_once(whole):
    toys, swept = whole

    assert (swept.built.stages, swept.cached.stages) == (BUILT, 0)
    assert swept.built.seconds > 0
    assert swept.built.dollars > 0  # the toys' machine has a price
    assert [row[2] for row in swept.report.table.rows] == [
        *("3 of 3", "2 of 3", "3 of 3", "1 of 3", "1 of 3")
    ]
    assert swept.report.sentences[0].startswith("best: p2 (optimizer.muon_lr=0.028)")
    tasks = task_runs("sweep-whole")
    assert {f"s{seed} / text" for seed in (1, 2, 3)} <= set(tasks)
    assert "p4 s1 / pretrain" in tasks
    assert "p4 s2 / pretrain" not in tasks
    store = toys.context().store
    run = find_run(store, "toy-p2-s3-sweep-whole")
    assert (run.status, set(run.stages)) == ("finished", {"text", "pretrain"})
    assert find_run(store, "toy-p4-s2-sweep-whole") is None
    assert artifacts("sweep-toy-results")
    assert artifacts("sweep-toy-plot")[0].data.startswith("data:image/svg+xml,")
    assert most_on_the_gpu(toys) == 1

    again = run_sweep(toys, toy_sweep(VARY), "sweep-again")
    assert (again.built.stages, again.cached.stages) == (0, BUILT)
    assert again.report == swept.report


def test_killed_in_the_middle_it_ends_with_the_same_files(whole, toys):
    assert run_process(toys, "8") == -signal.SIGKILL  # events: of 13 stages each gives some
    run_sweep(toys, toy_sweep(VARY), "sweep-resumed")

    expected = files_of(whole[0].home)
    assert expected.keys() == {"sweep.html", "sweep.json"}
    assert files_of(toys.home) == expected


def test_a_point_that_fails_takes_nothing_from_the_others_and_only_it_is_built_again(toys, server):
    sweep = toy_sweep("optimizer.muon_lr=0.01,0.05", seeds=(1,))
    toys.set_broken("0.01")
    error = r"1 of 3 runs failed, p1 s1 \(p1 / pretrain: .*broken.*sweep\.html"
    with pytest.raises(StageError, match=error):
        run_sweep(toys, sweep, "sweep-broken")

    states = {name: state.name for name, state in task_runs("sweep-broken").items()}
    assert states == dict.fromkeys(("text", "base / pretrain", "p2 / pretrain"), "Completed") | {
        "p1 / pretrain": "Failed"
    }
    runs = [f"toy-{point}-s1-sweep-broken" for point in ("base", "p1", "p2")]
    found = [find_run(toys.context().store, run) for run in runs]
    assert [run and run.status for run in found] == ["finished", "failed", "finished"]
    page = (toys.home / "sweep" / "toy" / "sweep.html").read_text()
    (line,) = (line for line in page.splitlines() if "<li>p1 / pretrain: " in line)
    assert "broken" in line

    toys.set_broken("0.01", False)
    swept = run_sweep(toys, sweep, "sweep-mended")
    assert (swept.built.stages, swept.cached.stages) == (1, 3)
    assert toys.kinds("text").count("building") == 1
    assert swept.report.tree["errors"] == {}
