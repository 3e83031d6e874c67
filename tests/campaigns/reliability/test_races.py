"""Artifacts that two processes want at once, on each kind of store and home."""

import uuid
from pathlib import Path

import pytest

from tests.conftest import BUCKET
from tests.support.campaigns import Campaign
from tests.support.reliability.races import HOMES, open_track, run_races


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["directory", "s3"])
@pytest.mark.parametrize("homes", HOMES)
def test_artifacts_that_two_want_at_once_are_made_once(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, homes: str, campaign: Campaign
) -> None:
    store = (tmp_path / "store").as_uri()
    if kind == "s3":
        request.getfixturevalue("s3_store")  # the environment is its client's
        store = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    races = campaign.trials(50)
    with open_track(tmp_path, store, HOMES[homes]) as track:
        campaign.found(f"made once in {run_races(track, races, seed=campaign.seed)} of {races}")
