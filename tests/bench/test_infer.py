"""The bench of answers without a peer, and what a line of it says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.torch


def test_without_a_checkout_of_nanochat_it_says_so_and_measures_nothing() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "NANOCHAT_DIR"}
    found = subprocess.run(
        [sys.executable, "bench/infer.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "bench infer is skipped: NANOCHAT_DIR names no checkout of nanochat\n"
