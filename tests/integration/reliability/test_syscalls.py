"""A commit is stopped at a sample of its system calls; tests/campaigns stops it at each."""

from pathlib import Path

import pytest

from tests.support.reliability.syscalls import (
    Point,
    check,
    needs_strace,
    open_bench,
    server_of,
    stop_commits,
)

FEW = {"file": 20, "s3": 6}  # points; what a server does between requests is simulated
pytestmark = needs_strace


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_commit_stopped_at_a_system_call_is_whole_or_not_there(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with open_bench(tmp_path, server_of(kind, request)) as bench:
        check(stop_commits(bench, count=FEW[kind], seed=1))


def test_a_store_that_writes_in_place_is_caught(tmp_path: Path) -> None:
    with open_bench(tmp_path, None, store="in place") as bench:
        last = bench.dry_run()["write"]
        nearest = reversed(range(last - 8, last))
        points = (Point(call="write", nth=n, how="killed") for n in nearest)
        assert any(bench.disturb(point).verdict.state == "torn" for point in points)
