"""Every request of a run breaks in every way, and some runs are storms."""

from collections import Counter
from pathlib import Path

import pytest

from tests.support.campaigns import Campaign
from tests.support.reliability.fault_pipeline import open_pipeline, try_faults


@pytest.mark.timeout(4 * 3600)
def test_every_request_may_break_in_every_way(tmp_path: Path, campaign: Campaign) -> None:
    with open_pipeline(tmp_path) as pipeline:
        outcomes = try_faults(pipeline, trials=campaign.trials(60), seed=campaign.seed)
    campaign.found(
        f"{sum(len(outcome.fired) for outcome in outcomes):,} faults in {len(outcomes):,} runs: "
        f"{dict(Counter(outcome.ended for outcome in outcomes))}, "
        f"at most {max(outcome.ratio for outcome in outcomes):.1f} times the requests"
    )
    assert [outcome for outcome in outcomes if not outcome.is_good] == []
