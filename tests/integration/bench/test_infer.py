"""The bench of answers without a peer, and what a line of it says."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from bench.infer import PEER, SIDES, advance, find_failures, main

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.torch


def test_without_a_checkout_of_nanochat_it_says_so_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NANOCHAT_DIR", raising=False)
    monkeypatch.setattr(sys, "argv", ["infer"])
    assert main() == 0
    said = capsys.readouterr().out
    assert said == "bench infer is skipped: NANOCHAT_DIR names no checkout of nanochat\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["infer", "--device", "cuda", "--at-least", "1"])
    assert main() == 0
    said = capsys.readouterr().out
    assert said == "bench infer is skipped: --device cuda, and torch sees no GPU\n"


def row(side: str, ratio: float) -> dict[str, Any]:
    return {"depth": 4, "batch": 8, "prompt": 64, "side": side, "ratio_rest": ratio}


def test_a_side_that_is_slower_than_wanted_fails_and_the_peer_never_does() -> None:
    rows = [row(PEER, 1.0), row("native:fp32", 1.5), row("torch:fp32", 1.2)]
    assert find_failures(rows, field="ratio_rest", at_least=None) == []
    assert find_failures(rows, field="ratio_rest", at_least=1.2) == []
    assert find_failures(rows, field="ratio_rest", at_least=1.3) == [
        "d4 batch 8 prompt 64: torch:fp32 is 1.20 times the peer, 1.3 is wanted"
    ]


def test_where_every_side_was_left_out_nothing_was_shown() -> None:
    assert find_failures([row(PEER, 1.0)], field="ratio_rest", at_least=0.1) == [
        "no side was measured"
    ]


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
