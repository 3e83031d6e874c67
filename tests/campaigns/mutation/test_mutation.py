"""The tests kill every mutant."""

import pytest

from tests.campaigns.mutation.mutants import (
    GUARDS,
    ROOT,
    TABLE,
    find_survivors,
    read_mutants,
)
from tests.support.campaigns import Campaign


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("subject", GUARDS)
def test_the_tests_of_a_subject_kill_its_mutants(subject: str, campaign: Campaign) -> None:
    mutants = [m for m in read_mutants(TABLE.read_text("utf-8")) if m.subject == subject]
    survivors = find_survivors(ROOT, GUARDS[subject].split(), mutants)
    campaign.found(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants killed")
    assert survivors == []
