"""A campaign starts from its seed, runs as often as it is asked, and ends in a row of a table."""

import os
import subprocess
import sys

ONE = "tests/campaigns/reliability/test_simulation.py"


def test_a_campaign_ends_in_a_row_with_what_it_found_and_how_to_repeat_it() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ONE, "-k", "plain"]
    environment = {**os.environ, "NANOCHAT_SEED": "7", "NANOCHAT_TRIALS": "5"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    start = lines.index("| campaign, seed 7 | ended | found | seconds |")
    name, ended, found = (cell.strip() for cell in lines[start + 2].split("|")[1:4])
    assert name.startswith("reliability/test_simulation.py::")
    assert (ended, found.partition(",")[0]) == ("passed", "0 of 5 broken")
    assert lines[start + 3] == f"again: NANOCHAT_SEED=7 .venv/bin/pytest {ONE}"
