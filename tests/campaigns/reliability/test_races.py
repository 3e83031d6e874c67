"""Artifacts that two processes want at once, on each kind of store and home."""

from pathlib import Path

import pytest

from tests.support.campaigns import Campaign
from tests.support.reliability.races import HOMES, check, made_once, open_track, run_races, url_of


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["directory", "s3"])
@pytest.mark.parametrize("homes", HOMES)
def test_artifacts_that_two_want_at_once_are_made_once(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, homes: str, campaign: Campaign
) -> None:
    with open_track(tmp_path, url_of(kind, request), HOMES[homes]) as track:
        outcomes = run_races(track, campaign.trials(50), seed=campaign.seed)
    wrong = sum(bool(outcome.wrong()) for outcome in outcomes)
    campaign.found(f"made once in {made_once(outcomes)} of {len(outcomes)} races, {wrong} wrong")
    check(outcomes)
