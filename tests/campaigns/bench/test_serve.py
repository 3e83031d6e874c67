"""The bench of the chat server beside a checkout of nanochat."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SMALL = "--depth 1 --clients 2 --tokens 4 --rounds 1"
pytestmark = pytest.mark.torch


@pytest.mark.skipif("NANOCHAT_JAN_DIR" not in os.environ, reason="NANOCHAT_JAN_DIR is not set")
def test_the_peer_serves_the_same_weights() -> None:
    command = [sys.executable, "bench/serve.py", *SMALL.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ratio_tokens_per_second"] > 0
    assert result["peer"].keys() == result["ours"].keys()
