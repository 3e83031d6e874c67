"""The bench of the chat server: both sides serve what it says they serve."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.serve import broken_limits

ROOT = Path(__file__).parents[3]
SMALL = "--depth 1 --clients 2 --tokens 4 --rounds 1"
pytestmark = pytest.mark.torch


def run(environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "bench/serve.py", *SMALL.split()],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )


def test_without_the_peer_it_says_so_and_measures_us() -> None:
    found = run({k: v for k, v in os.environ.items() if k != "NANOCHAT_JAN_DIR"})
    first, *_, last = found.stdout.splitlines()
    assert first == "NANOCHAT_JAN_DIR is not set: there is no peer to compare with"
    measured = json.loads(last)
    assert "peer" not in measured
    assert measured["ours"]["tokens_per_second"] > 0
    assert measured["ours"]["one_first_token_ms"] > 0
    assert measured["ours"]["slot_free_ms"] > 0


def test_each_limit_that_is_not_kept_is_named() -> None:
    ours = {"one_first_token_ms": 13.0, "health_ms": 21.0, "slot_free_ms": 49.0}
    found = {"ours": ours, "ratio_tokens_per_second": 8.0, "ratio_first_token": 19.9}
    limits = {"at_least": 8.0, "at_least_first_token": 20, "most_health_ms": 20}
    options = argparse.Namespace(**limits, most_slot_free_ms=50, most_first_token_ms=12)
    assert broken_limits(options, found) == [
        "first token: 19.9 times, at least 20 wanted",
        "one client's first token: 13.0 ms, at most 12 wanted",
        "/health: 21.0 ms, at most 20 wanted",
    ]
    none = argparse.Namespace(**dict.fromkeys(vars(options)))
    assert broken_limits(none, found) == []
    del found["ratio_tokens_per_second"], found["ratio_first_token"]
    assert len(broken_limits(options, found)) == 2
