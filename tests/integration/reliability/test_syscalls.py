"""A commit to a directory is stopped at a sample of its system calls; see tests/campaigns.

There it is stopped at each, and one to S3 too, of which test_simulation.py covers every request.
"""

from pathlib import Path

from tests.support.reliability.syscalls import (
    Point,
    check,
    needs_strace,
    open_bench,
    stop_commits,
)

FEW = 20  # points
pytestmark = needs_strace


def test_a_commit_stopped_at_a_system_call_is_whole_or_not_there(tmp_path: Path) -> None:
    with open_bench(tmp_path, None) as bench:
        check(stop_commits(bench, count=FEW, seed=1))


def test_a_store_that_writes_in_place_is_caught(tmp_path: Path) -> None:
    with open_bench(tmp_path, None, store="in place") as bench:
        last = bench.dry_run()["write"]
        nearest = reversed(range(last - 8, last))
        points = (Point(call="write", nth=n, how="killed") for n in nearest)
        assert any(bench.disturb(point).verdict.state == "torn" for point in points)
