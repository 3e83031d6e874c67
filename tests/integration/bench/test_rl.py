"""The bench of rollouts: what it asks of an engine is what it says it asks."""

import json
import sys

import pytest

pytest.importorskip("torch")
from bench.rl import main

pytestmark = pytest.mark.torch


def test_even_answers_never_end_and_ragged_ones_end_by_chance(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--depth 1 --prompts 2 --samples 64 --rounds 1 --even-tokens 8 --ragged-tokens 24"
    monkeypatch.setattr(sys, "argv", ["rl", *sizes.split(), "--end-chance", "0.08"])
    monkeypatch.delenv("NANOCHAT_DIR", raising=False)
    main()
    found = capsys.readouterr()
    assert "NANOCHAT_DIR is not set: there is no peer to compare with" in found.err
    rates = json.loads(found.out.splitlines()[-1])
    assert rates["even"]["ours"]["answer_tokens"] == 8.0
    expected = sum(0.92**i for i in range(1, 25))  # 10: each token is there if none before ended
    # Of 128 answers the mean has a standard error of 0.7.
    assert rates["ragged"]["ours"]["answer_tokens"] == pytest.approx(expected, rel=0.25)
    assert "peer" not in rates["even"]
    assert rates["settings"]["precision"] == "model"  # as the peer's: fp32 on a CPU
