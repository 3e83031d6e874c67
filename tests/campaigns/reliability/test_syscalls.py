"""A commit is stopped at any of its system calls: another sample each day."""

from pathlib import Path

import pytest

from tests.support.campaigns import Campaign
from tests.support.reliability.syscalls import (
    check,
    needs_strace,
    open_bench,
    server_of,
    stop_commits,
)


@needs_strace
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_commit_may_be_stopped_at_any_system_call(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, campaign: Campaign
) -> None:
    with open_bench(tmp_path, server_of(kind, request)) as bench:
        found = stop_commits(bench, count=campaign.trials(250), seed=campaign.seed)
    whole = sum(outcome.verdict.state == "whole" for outcome in found)
    faulty = sum(bool(outcome.faults) for outcome in found)
    campaign.found(f"{len(found):,} points: {whole:,} ended whole, {faulty} broke a promise")
    check(found)
