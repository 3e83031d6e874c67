"""The commit protocol, and garbage collection, hold in thousands of simulated histories."""

import pytest

from tests.support.campaigns import Campaign
from tests.support.reliability import gc_histories
from tests.support.reliability.simulation import PLAIN, Kind, simulate_many


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("kind", "histories"),
    [(PLAIN, 60_000), (Kind(gc=True), 300)],
    ids=["commits", "collected"],
)
def test_every_invariant_holds_in_every_history(
    kind: Kind, histories: int, campaign: Campaign
) -> None:
    tally = simulate_many(campaign.seeds(histories), kind)
    campaign.found(
        f"{len(tally.broken)} of {tally.histories:,} broken, {tally.operations:,} operations"
    )
    assert not tally.broken, tally.report(kind)
    if kind.gc:
        gc_histories.check(tally)
