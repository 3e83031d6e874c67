"""A commit to a directory is stopped at every call that reaches a file."""

from pathlib import Path

import pytest

from infra.storage.local import LocalStore
from tests.support.campaigns import Campaign
from tests.support.reliability.syscalls import stop_commits


@pytest.mark.timeout(3600)
def test_a_commit_to_a_directory_may_be_stopped_at_any_call(
    tmp_path: Path, campaign: Campaign
) -> None:
    count = campaign.trials(10_000)
    number, faults = stop_commits(LocalStore, tmp_path, count=count, seed=campaign.seed)
    campaign.found(f"{number:,} points, {len(faults)} broke a promise")
    assert faults == []
