"""Every request of a run breaks in every way, and some runs are storms."""

from pathlib import Path

import pytest

from tests.support.campaigns import Campaign
from tests.support.infra.storage.s3_server import S3Server
from tests.support.reliability.fault_pipeline import BUCKET, open_pipeline
from tests.support.reliability.faults import bad, summary, try_faults


@pytest.mark.timeout(4 * 3600)
def test_every_request_may_break_in_every_way(
    s3_server: S3Server, tmp_path: Path, campaign: Campaign
) -> None:
    s3_server.client("s3").create_bucket(Bucket=BUCKET)
    with open_pipeline(tmp_path, s3_server.environment) as pipeline:
        results = try_faults(pipeline, trials=campaign.trials(60), seed=campaign.seed)
    campaign.found(summary(results))
    assert bad(results) == []
