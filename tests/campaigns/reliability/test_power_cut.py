"""What was acknowledged survives a thousand power cuts."""

import pytest

from tests.support.campaigns import Campaign
from tests.support.reliability.power_cut import cut_power, needs_power


@needs_power
@pytest.mark.timeout(1800)
def test_what_was_acknowledged_survives_a_thousand_power_cuts(campaign: Campaign) -> None:
    cuts = campaign.trials(1000)
    report = cut_power(cuts=cuts, seed=campaign.seed)
    found = f"{report.acknowledged:,} acknowledged artifacts, {len(report.faults)} faults"
    campaign.found(f"{cuts:,} cuts, {found}")
    assert report.faults == []
