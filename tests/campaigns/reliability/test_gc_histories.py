"""Garbage is collected while runs use the store: simulated histories."""

import pytest

from tests.support.campaigns import Campaign
from tests.support.reliability.gc_histories import check, simulate, summary


@pytest.mark.timeout(7200)
def test_what_is_in_use_stays_whole_and_the_rest_goes(campaign: Campaign) -> None:
    histories = [simulate(seed) for seed in campaign.seeds(500)]
    campaign.found(summary(histories))
    check(histories)
