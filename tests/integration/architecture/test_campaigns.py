"""The campaigns, which no other check runs, can still be started and are run often enough."""

import signal
import subprocess
import sys
import time
import warnings
from datetime import date, timedelta
from pathlib import Path

import pytest

from tests.support.campaign_groups import (
    GROUPS,
    ROOT,
    TABLE,
    git,
    has_failed,
    read_rows,
    render,
    run_tests,
)

CAMPAIGNS = ROOT / "tests" / "campaigns"
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
    head, rows = git("log", "-1", "--format=%cs"), read_rows(TABLE.read_text("utf-8"))
    assert set(rows) == set(GROUPS)
    if not head:
        pytest.skip("not a git checkout")
    now, forgotten = date.fromisoformat(head), list[str]()
    for name, row in rows.items():
        age = now - date.fromisoformat(row[2])
        if age > timedelta(weeks=NAME_WEEKS) or has_failed(row[-1]):
            warnings.warn(f"campaign {name!r}: {render(row)}", stacklevel=1)
        forgotten += [name] if age > timedelta(weeks=FAIL_WEEKS) else []
    assert forgotten == []


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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a shell
    began = time.monotonic()
    result = run_tests([_tests(tmp_path, ["time.sleep(600)"])], stop_minutes=0.05)
    assert time.monotonic() - began < 100  # by SIGINT, not by SIGKILL
    assert has_failed(str(result))


def _tests(folder: Path, bodies: list[str]) -> str:
    file = folder / "test_some.py"
    tests = (f"def test_{number}():\n    {body}\n" for number, body in enumerate(bodies))
    file.write_text("import time\n\nimport pytest\n\n" + "\n".join(tests))
    return str(file)
