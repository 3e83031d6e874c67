"""The commit protocol holds in every simulated history, and the simulation finds what is broken.

Hundreds of histories here, 130,000 in tests/campaigns; what the last campaign gave is in
docs/reliability.md. A history that breaks is named with the command that shows its operations.
"""

import pytest

from tests.support.reliability.sim_mutations import MUTATIONS
from tests.support.reliability.simulation import PLAIN, Kind, Tally, simulate, simulate_many

NORMAL = 1000  # histories; tests/campaigns has more
UNTIL_FOUND = 2000  # seeds within which a missing protection shows; most need five
HAPPENS = (
    *(
        "lost request",
        "lost answer",
        "retried",
        "refused",
        "duplicate",
        "late",
        "slow",
        "stale",
        "damaged",
    ),
    *("crash before", "crash after", "started again", "pause before", "pause after", "cut off"),
    "clock set",
    *("lease taken up", "lease taken over", "LeaseLost", "StoreUnavailable"),
    *("published", "adopted", "divergent", "read", "redone", "revoked"),
)


@pytest.fixture(scope="module")
def tally() -> Tally:
    return simulate_many(range(NORMAL))


def test_every_invariant_holds_in_every_history(tally: Tally):
    assert not tally.broken, tally.report(PLAIN)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_missing_protection_is_found(mutation: str):
    kind = Kind(mutation=mutation)
    assert simulate_many(range(UNTIL_FOUND), kind, max_broken=1).broken


def test_histories_meet_everything_that_can_go_wrong(tally: Tally):
    assert [what for what in HAPPENS if tally.met[what] < 10] == []


def test_a_seed_gives_the_same_history_each_time():
    first, *others = (simulate(7, trace=True) for _ in range(3))
    assert first.trace
    assert all(other == first for other in others)


def test_another_seed_gives_another_history():
    assert simulate(7, trace=True).trace != simulate(8, trace=True).trace


def test_a_broken_history_comes_with_the_command_that_shows_it():
    kind = Kind(mutation="manifest-before-files")
    report = simulate_many(range(3), kind).report(kind)
    assert "3 of 3 histories broke" in report
    assert (
        "tests.support.reliability.simulation --seed 0 --mutation manifest-before-files" in report
    )
    assert "published a manifest before its file" in simulate(0, kind, trace=True).trace[-1]
