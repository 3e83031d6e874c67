"""The bench of evaluation beside a checkout of nanochat."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CASES = {"hellaswag", "arc", "boolq", "winograd", "lambada", "wikidata", "squad"}
SMALL = "--depth 1 --core 1 --categorical 3 --generative 1 --new-tokens 3 --rounds 1"
pytestmark = pytest.mark.torch


@pytest.mark.skipif("NANOCHAT_DIR" not in os.environ, reason="NANOCHAT_DIR is not set")
def test_the_peer_gives_the_same_answers() -> None:
    command = [sys.executable, "bench/eval.py", *SMALL.split(), "--precisions", "fp32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ratios"]["ours fp32"].keys() == CASES | {"categorical", "generative", "core"}
    assert result["equal"]["ours fp32"] == {
        **{case: [1, 1] for case in CASES},
        "categorical": [3, 3],
        "generative": [1, 1],
    }
