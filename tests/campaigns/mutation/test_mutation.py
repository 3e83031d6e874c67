"""The mutation campaign finds a survivor."""

import subprocess
from pathlib import Path

import pytest

from tests.campaigns.mutation.__main__ import NoResult, read_mutants, render, run_subject

SMALL = """== small
@ half.py
# half of an odd number is rounded down
- n // 2
+ n / 2
# half of 4 is 2
-     return n // 2
+     half = 1
+     return half"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a repository of one function and a test of it, which does not know the half of 4."""
    (tmp_path / "half.py").write_text("def half(n):\n    return n // 2\n")
    test = "from half import half\n\n\ndef test_half():\n    assert [half(2), half(3)] == [1, 1]\n"
    (tmp_path / "test_half.py").write_text(test)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_a_mutant_of_code_that_has_changed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0 times in the file, not once: n // 2"):
        read_mutants(SMALL)[0].mutate("def half(n):\n    return n >> 1\n")


def test_a_mutant_that_no_test_sees_survives_and_is_named(small: Path) -> None:
    row = run_subject(small, "small", ["test_half.py"], read_mutants(SMALL))
    assert [mutant.promise for mutant in row.survivors] == ["half of 4 is 2"]
    assert (small / "half.py").read_text() == "def half(n):\n    return n // 2\n"
    _, _, counts, survived = render([row]).splitlines()
    assert counts.startswith("| small | 2 | 1 | 50% |")
    assert survived == "survived: half.py: half of 4 is 2"


def test_tests_that_fail_without_a_mutant_give_no_result(small: Path) -> None:
    (small / "half.py").write_text("def half(n):\n    return n\n")
    with pytest.raises(NoResult, match="fail without a mutant"):
        run_subject(small, "small", ["test_half.py"], read_mutants(SMALL))
