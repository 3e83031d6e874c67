"""The campaigns, which no other check runs, can still be started and are run often enough."""

import subprocess
import sys
import warnings
from datetime import date, timedelta
from pathlib import Path

import pytest

from tests.support.campaign_groups import (
    GROUPS,
    HEADER,
    ROOT,
    TABLE,
    Row,
    by_urgency,
    head_date,
    read_rows,
    run_tests,
    with_row,
)

CAMPAIGNS = ROOT / "tests" / "campaigns"
PAGE = f"# Page\n\n{HEADER}\n|---|---|---|---|---|---:|---|\n"
NAME_WEEKS, FAIL_WEEKS = 2, 4


def test_every_campaign_can_be_imported_and_its_fixtures_exist() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--setup-plan", "tests/campaigns"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout[-4000:]


def test_every_campaign_is_in_one_group_of_at_most_fourteen() -> None:
    grouped = [
        file
        for paths in GROUPS.values()
        for path in paths
        for file in ([CAMPAIGNS / path] if path.endswith(".py") else (CAMPAIGNS / path).rglob("*"))
        if file.name.startswith("test_") and file.suffix == ".py"
    ]
    assert sorted(grouped) == sorted(CAMPAIGNS.rglob("*/test_*.py"))
    assert len(GROUPS) <= 14


@pytest.mark.filterwarnings("always:campaign")
def test_no_group_of_campaigns_is_forgotten() -> None:
    """A group's age is counted up to the newest commit: a project that rests stays green."""
    head, rows = head_date(), read_rows(TABLE.read_text("utf-8"))
    assert set(rows) == set(GROUPS)
    if head is None:
        pytest.skip("not a git checkout")
    ages = {name: head - row.last_passed for name, row in rows.items()}
    for name, age in ages.items():
        if age > timedelta(weeks=NAME_WEEKS) or rows[name].failed:
            warnings.warn(f"campaign {name!r}: {rows[name].render()}", stacklevel=1)
    assert [name for name, age in ages.items() if age > timedelta(weeks=FAIL_WEEKS)] == []


def _row(group: str, day: int, result: str = "3 passed") -> Row:
    return Row(group, date(2026, 11, day), date(2026, 11, 1), "1eb986ef", "20261129", "7", result)


def test_a_row_replaces_the_one_of_its_group() -> None:
    page = PAGE + "\nafter\n"
    for row in (_row("a", 1), _row("b", 2), _row("a", 3, "1 failed")):
        page = with_row(page, row)
    assert read_rows(page) == {"a": _row("a", 3, "1 failed"), "b": _row("b", 2)}
    assert page.startswith(PAGE + "| a | 2026-11-03 |")
    assert page.endswith("|\n\nafter\n")


def test_the_group_not_run_for_longest_is_next_also_if_another_failed() -> None:
    rows = {"old": _row("old", 1), "new": _row("new", 9), "red": _row("red", 8, "2 failed")}
    assert by_urgency(rows, ["new", "old", "never", "red"]) == ["never", "old", "red", "new"]


@pytest.mark.parametrize(
    ("bodies", "result"),
    [
        (["pass", "assert 0", "pytest.skip('no tool')"], "1 passed, 1 failed, 1 skipped"),
        (["pytest.skip('no tool')"], None),
    ],
)
def test_a_result_counts_what_ran_and_a_group_of_skipped_tests_has_none(
    tmp_path: Path, bodies: list[str], result: str | None
) -> None:
    assert run_tests([_tests(tmp_path, bodies)]) == result


def test_a_group_that_does_not_end_is_stopped_and_has_failed(tmp_path: Path) -> None:
    result = run_tests([_tests(tmp_path, ["time.sleep(600)"])], stop_minutes=0.05)
    assert result is not None
    assert result.endswith("stopped after 0.05 min")
    assert _row("endless", 1, result).failed


def _tests(folder: Path, bodies: list[str]) -> str:
    file = folder / "test_some.py"
    tests = (f"def test_{number}():\n    {body}\n" for number, body in enumerate(bodies))
    file.write_text("import time\n\nimport pytest\n\n" + "\n".join(tests))
    return str(file)
