"""For campaigns: today's seed, and a line of what each found."""

import pytest

from tests.support.campaigns import Campaign, todays_seed


@pytest.fixture
def campaign(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Campaign:
    """Return the seed of the day, which is printed with the command that repeats the campaign."""
    seed, test = todays_seed(), request.node.nodeid
    print(f"again: NANOCHAT_SEED={seed} .venv/bin/pytest '{test}'")

    def found(what: object) -> None:
        with capsys.disabled():
            print(f"\n{test}, seed {seed}: {what}")

    return Campaign(seed=seed, found=found)
