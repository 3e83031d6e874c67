"""What was acknowledged survives a thousand power cuts."""

import pytest

from tests.support.campaigns import Campaign
from tests.support.reliability.power_cut import check, cut_power, needs_power


@needs_power
@pytest.mark.timeout(1800)
def test_what_was_acknowledged_survives_a_thousand_power_cuts(campaign: Campaign) -> None:
    report = cut_power(cuts=campaign.trials(1000), seed=campaign.seed)
    campaign.found(
        f"{report.cuts:,} cuts, {report.acknowledged:,} acknowledged objects: "
        f"{report.lost} lost, {report.torn} torn, {report.different} different, "
        f"{report.stuck} stuck"
    )
    check(report)
