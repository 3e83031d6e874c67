"""Thousands of damaged objects are found before they are used."""

from pathlib import Path

import pytest

from tests.support.campaigns import Campaign
from tests.support.reliability.damage import Damages


@pytest.mark.timeout(3600)
def test_thousands_of_damages_are_found_before_they_are_used(
    tmp_path: Path, campaign: Campaign
) -> None:
    damages = Damages(tmp_path, seed=campaign.seed)
    damages.run(campaign.trials(10_000))
    campaign.found(damages.summary())
    assert damages.faults == []
