"""The bench of answers: what it charges the peer with, and both sides on a GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

from bench.infer import PEER, SIDES, advance

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.torch


def test_the_peer_is_not_charged_with_the_pass_after_its_last_token() -> None:
    passes = list[int]()

    def generate() -> Iterator[int]:  # as nanochat's engine: a pass after each token
        for number in range(4):
            yield number
            passes.append(number)

    columns = generate()
    next(columns)
    advance(columns, 3)
    assert passes == [0, 1, 2]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or "NANOCHAT_DIR" not in os.environ,
    reason="needs a GPU, and NANOCHAT_DIR to name a checkout of nanochat",
)
def test_on_a_gpu_both_runners_are_measured_beside_the_peer() -> None:
    words = "--device cuda --depths 2 --batch-sizes 2 --prompts 64 --rounds 1 --tokens 8"
    found = subprocess.run(
        [sys.executable, "bench/infer.py", *words.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    tree = json.loads(found.stdout.splitlines()[-1])
    assert [row["side"] for row in tree["rows"]] == [PEER, *SIDES["cuda"]]
