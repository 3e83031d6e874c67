"""The tests kill every mutant, and the campaign finds one that survives."""

import subprocess
from pathlib import Path

import pytest

from tests.campaigns.mutation.mutants import (
    GUARDS,
    ROOT,
    TABLE,
    find_survivors,
    read_mutants,
)
from tests.support.campaigns import Campaign

SMALL = """== small
@ half.py
# half of an odd number is rounded down
- n // 2
+ n / 2
# half of 4 is 2
-     return n // 2
+     half = 1
+     return half"""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("subject", GUARDS)
def test_the_tests_of_a_subject_kill_its_mutants(subject: str, campaign: Campaign) -> None:
    mutants = [m for m in read_mutants(TABLE.read_text("utf-8")) if m.subject == subject]
    survivors = find_survivors(ROOT, GUARDS[subject].split(), mutants)
    campaign.found(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants killed")
    assert survivors == []


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a repository of one function and a test of it, which does not know the half of 4."""
    (tmp_path / "half.py").write_text("def half(n):\n    return n // 2\n")
    test = "from half import half\n\n\ndef test_half():\n    assert [half(2), half(3)] == [1, 1]\n"
    (tmp_path / "test_half.py").write_text(test)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_a_mutant_that_no_test_sees_survives(small: Path) -> None:
    survivors = find_survivors(small, ["test_half.py"], read_mutants(SMALL))
    assert [mutant.promise for mutant in survivors] == ["half of 4 is 2"]
    assert (small / "half.py").read_text() == "def half(n):\n    return n // 2\n"
