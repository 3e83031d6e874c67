"""`nanochat miniseries` trains, and a second command builds nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli.app import main


@pytest.mark.torch
@pytest.mark.prefect
@pytest.mark.timeout(3000)
def test_two_depths_of_tiny_are_trained_and_a_second_command_builds_nothing(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "flows.cli.app", "miniseries", "tiny", "--depths", "1,2"]
    words += ["--gpus", "0", "--home", str(tmp_path), "--name", "small"]
    for text in ("pretrain.num_steps=4", "pretrain.eval_tokens=4096", "base_eval.eval_tokens=4096"):
        words += ["--set", text]
    said: list[str] = []
    try:
        for _ in range(2):
            done = subprocess.run(words, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            said.append(done.stdout)
    finally:
        main(["down", "--home", str(tmp_path)])

    assert "built now: 9 stages" in said[0]
    assert "reused: 9 stages" in said[1]
    assert (tmp_path / "sweep" / "small" / "sweep.svg").exists()
    table = [[line for line in text.splitlines() if line.startswith("d1 ")][-1] for text in said]
    assert table[0] == table[1]
