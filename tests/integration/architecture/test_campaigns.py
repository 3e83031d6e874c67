"""The campaigns, which no other check runs, can still be started."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_campaign_can_be_imported_and_its_fixtures_exist() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--setup-plan", "tests/campaigns"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout[-4000:]
