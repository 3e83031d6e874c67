"""The benches of evaluation, serving and training beside a checkout of nanochat."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.train import measure
from tests.integration.bench.test_train import TINY

ROOT = Path(__file__).parents[3]
CASES = {"hellaswag", "arc", "boolq", "winograd", "lambada", "wikidata", "squad"}
pytestmark = pytest.mark.torch


def beside(variable: str, command: str) -> Any:
    """Return the last line that a bench prints; skip the test without a checkout to compare."""
    if variable not in os.environ:
        pytest.skip(f"{variable} names no checkout of nanochat")
    words = [sys.executable, *command.split()]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_the_peer_gives_the_same_answers() -> None:
    small = "--depth 1 --core 1 --categorical 3 --generative 1 --new-tokens 3 --rounds 1"
    result = beside("NANOCHAT_DIR", f"bench/eval.py {small} --precisions fp32")
    assert result["ratios"]["ours fp32"].keys() == CASES | {"categorical", "generative", "core"}
    assert result["equal"]["ours fp32"] == {
        **{case: [1, 1] for case in CASES},
        "categorical": [3, 3],
        "generative": [1, 1],
    }


def test_the_peer_serves_the_same_weights() -> None:
    small = "--depth 1 --clients 2 --tokens 4 --rounds 1"
    result = beside("NANOCHAT_JAN_DIR", f"bench/serve.py {small}")
    assert result["ratio_tokens_per_second"] > 0
    assert result["peer"].keys() == result["ours"].keys()


def test_our_loop_runs_under_the_gate_and_its_sections_are_all_of_it() -> None:
    rounds = measure(TINY, None, rounds=1, steps=3, threads=1)
    timed, split = rounds["ours"]
    assert timed["steps"] == 3
    assert {"data", "forward", "loss", "backward", "optimizer"} <= split["sections"].keys()
    assert sum(split["sections"].values()) == pytest.approx(split["seconds"], rel=0.05)
    assert rounds["saving"][0]["sections"]["checkpoint"] > 0


@pytest.mark.skipif("NANOCHAT_DIR" not in os.environ, reason="NANOCHAT_DIR is not set")
def test_the_peer_s_own_script_runs_under_the_gate() -> None:
    checkout = os.environ["NANOCHAT_DIR"]
    rounds = measure(replace(TINY, depth=2), checkout, rounds=1, steps=2, threads=1)
    assert len(rounds["peer"]) == 2
    sections = {"forward", "loss", "backward", "optimizer"}
    assert sections <= rounds["peer"][-1]["sections"].keys()
