"""The bench of rollouts: what it asks of an engine is what it says it asks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.torch


def test_even_answers_never_end_and_ragged_ones_end_by_chance() -> None:
    sizes = "--depth 1 --prompts 2 --samples 64 --rounds 1 --even-tokens 8 --ragged-tokens 24"
    arguments = f"{sizes} --end-chance 0.08"
    environment = {k: v for k, v in os.environ.items() if k != "NANOCHAT_DIR"}
    found = subprocess.run(
        [sys.executable, "bench/rl.py", *arguments.split()],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "NANOCHAT_DIR is not set: there is no peer to compare with" in found.stderr
    told = json.loads(found.stdout.splitlines()[-1])
    assert told["even"]["ours"]["answer_tokens"] == 8.0
    expected = sum(0.92**i for i in range(1, 25))  # 10: each token is there if none before ended
    # Of 128 answers the mean has a standard error of 0.7.
    assert told["ragged"]["ours"]["answer_tokens"] == pytest.approx(expected, rel=0.25)
    assert "peer" not in told["even"]
