"""The tests kill every mutant."""

import pytest

from tests.campaigns.mutation.__main__ import GUARDS, ROOT, TABLE, read_mutants, run_subject
from tests.support.campaigns import Campaign


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("subject", GUARDS)
def test_the_tests_of_a_subject_kill_its_mutants(subject: str, campaign: Campaign) -> None:
    mutants = [m for m in read_mutants(TABLE.read_text("utf-8")) if m.subject == subject]
    row = run_subject(ROOT, subject, GUARDS[subject].split(), mutants)
    campaign.found(f"{row.mutants - len(row.survivors)} of {row.mutants} mutants killed")
    assert row.survivors == ()
