"""The bench of training next to a checkout of nanochat; the others: test_gpu.py."""

import os
from dataclasses import replace

import pytest

from bench.train import measure
from tests.integration.bench.test_train import TINY

pytestmark = pytest.mark.torch


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
