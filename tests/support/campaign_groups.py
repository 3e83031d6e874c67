"""Campaigns in groups of about a quarter of an hour, and the table that says when each ran last.

`python -m tests.campaigns` runs a group and writes its row of docs/reliability.md. The group that
was not run for longest comes first.
"""

import contextlib
import itertools
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "reliability.md"
HEADER = "| group | last run | last passed | commit | seed | minutes | result |"

# Group -> test files or folders below tests/campaigns. At most 14, at most 15 minutes each on two
# idle cores.
GROUPS = {
    "kill runs": ("reliability/test_kill_commands.py",),
    "kill trainings": (
        "reliability/test_kill_training.py",
        "nanochat_core/train",
    ),
    "kill rebuilds": ("reliability/test_kill_rebuild.py",),
    "kill stacks": (
        "infra/stack/test_cancels.py",
        "infra/stack/test_resumed_once.py",
    ),
    "stacks": (
        "infra/stack/test_mending.py",
        "infra/stack/test_postgres.py",
        "infra/stack/test_shared.py",
        "reliability/test_prefect_outage.py",
        "deployments",
    ),
    "stores": (
        "infra/storage",
        "reliability/test_damage.py",
        "reliability/test_faults.py",
    ),
    "power": ("reliability/test_power_cut.py", "reliability/test_syscalls.py"),
    "protocol": (
        "reliability/test_simulation.py",
        "reliability/test_two_commands.py",
    ),
    "clusters": (
        "infra/test_slurm_gangs.py",
        "reliability/test_two_hosts.py",
    ),
    "core": (
        "nanochat_core/engine",
        "nanochat_core/model",
        "nanochat_core/server",
    ),
    "attacks": (
        "security",
        "reliability/test_fuzz_server.py",
        "reliability/test_secrets.py",
    ),
    "mutants": ("mutation",),
    "users": ("end_to_end", "flows", "nanochat_flows"),
    "speed": ("bench",),
}
STOP_MINUTES = 30  # a busy machine takes twice as long; then the group has failed
_END_SECONDS = 120.0  # for the fixtures of a stopped group


def read_rows(text: str) -> dict[str, list[str]]:
    """Return the cells of each row of the table in a page, by group, its first cell."""
    lines = text.partition(HEADER)[2].splitlines()[2:]  # after the rule below the header
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {each[0]: each for each in cells}


def with_row(text: str, row: list[str]) -> str:
    """Return the page with the row in place of the group's former one, or below the others."""
    rows = read_rows(text)
    lines = text.splitlines()
    first = lines.index(HEADER) + 2
    after = lines[first + len(rows) :]
    rows[row[0]] = row
    return "\n".join([*lines[:first], *map(render, rows.values()), *after]) + "\n"


def render(row: list[str]) -> str:
    """Return a row in Markdown."""
    return f"| {' | '.join(row)} |"


def has_failed(result: str) -> bool:
    """Return whether a campaign of a group with this result failed or did not end."""
    return "failed" in result or "stopped" in result


def by_urgency(rows: dict[str, list[str]]) -> list[str]:
    """Return the groups, the one not run for longest first."""
    return sorted(GROUPS, key=lambda group: rows[group][1] if group in rows else "")


def run_tests(paths: Sequence[str], *, stop_minutes: float = STOP_MINUTES) -> str | None:
    """Run test files and return the result, or None if all of them were skipped.

    After `stop_minutes` pytest gets SIGINT, so that its fixtures end what they started; SIGKILL if
    they do not.
    """
    # A shell starts background processes with SIGINT ignored, which pytest would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-rfEs", *paths]
        command += [f"--junitxml={report}"]
        with subprocess.Popen(command, cwd=ROOT) as pytest:
            stopped = []
            try:
                pytest.wait(60 * stop_minutes)
            except subprocess.TimeoutExpired:
                stopped = [f"stopped after {stop_minutes:g} min"]
                pytest.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pytest.wait(_END_SECONDS)
                pytest.kill()
        if not report.exists():
            return ", ".join([f"failed: pytest ended with {pytest.returncode}", *stopped])
        suite = ElementTree.parse(report).getroot()[0].attrib
    skipped = int(suite["skipped"])
    failed = int(suite["failures"]) + int(suite["errors"])
    passed = int(suite["tests"]) - failed - skipped
    if not (passed or failed or stopped):
        return None
    counts = {"passed": passed, "failed": failed, "skipped": skipped}
    return ", ".join([f"{number} {kind}" for kind, number in counts.items() if number] + stopped)


def git(*words: str) -> str:
    """Return what git prints in this checkout: nothing if it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()
