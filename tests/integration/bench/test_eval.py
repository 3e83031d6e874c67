"""The bench of evaluation: it tells what it says it tells, and both sides answer alike."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CASES = {"hellaswag", "arc", "boolq", "winograd", "lambada", "wikidata", "squad"}
CHATS = {"categorical", "generative"}
SMALL = "--depth 1 --core 1 --categorical 3 --generative 1 --new-tokens 3 --rounds 1"
pytestmark = pytest.mark.torch


def run_bench(environment: dict[str, str]) -> tuple[dict, str]:
    done = subprocess.run(
        [sys.executable, "bench/eval.py", *SMALL.split(), "--precisions", "fp32"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_every_case_has_a_rate_and_core_is_one_question_of_each_shape() -> None:
    told, said = run_bench({k: v for k, v in os.environ.items() if k != "NANOCHAT_DIR"})
    assert "NANOCHAT_DIR is not set: there is no peer to compare with" in said
    assert told["rates"].keys() == CASES | CHATS | {"core"}
    rates = {case: rate["ours fp32 per cpu second"] for case, rate in told["rates"].items()}
    expected = len(CASES) / sum(1 / rates[case] for case in CASES)
    assert rates["core"] == pytest.approx(expected)
    assert told["ratios"] == told["equal"] == {}
