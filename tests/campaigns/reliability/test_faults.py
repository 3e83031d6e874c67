"""Every request of a run breaks in every way, and some runs are storms."""

from pathlib import Path

import pytest

from tests.support.campaigns import Campaign
from tests.support.reliability.fault_pipeline import open_pipeline
from tests.support.reliability.faults import bad, summary, try_faults


@pytest.mark.timeout(4 * 3600)
def test_every_request_may_break_in_every_way(tmp_path: Path, campaign: Campaign) -> None:
    with open_pipeline(tmp_path) as pipeline:
        results = try_faults(pipeline, trials=campaign.trials(60), seed=campaign.seed)
    campaign.found(summary(results))
    assert bad(results) == []
