"""Two ranks save together, and any number of ranks goes on; so do both if one had no memory."""

import json
import shutil
from dataclasses import replace

import pytest

from infra.launch.fitting import fitting
from infra.launch.torchrun import StageInterrupted, run_job
from nanochat_core.errors import OutOfMemory

pytestmark = pytest.mark.torch

SMALL_RANK_1 = """
import os
import torch
from nanochat_core.model.gpt import GPT
from nanochat_core.train import pretrain

real = GPT.summed_loss
passes = iter(range(10**6))

def summed_loss(self, tokens, *rest):
    if os.environ["RANK"] == "1" and torch.is_grad_enabled() and len(tokens) > 1:
        if next(passes) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
    return real(self, tokens, *rest)

GPT.summed_loss = summed_loss
run = pretrain.run
"""


def test_what_two_ranks_saved_two_go_on_with_to_the_bit_and_one_to_rounding(bench, tmp_path):
    whole, parts = (bench.job("pretrain", name) for name in ("whole", "parts"))
    run_job(whole, processes=2, on_event=lambda event: None)
    with pytest.raises(StageInterrupted):
        run_job(parts, processes=2, on_event=lambda event: None, steps=3)
    saved = parts.checkpoints / "step-0000003"
    committed = json.loads((saved / "COMMIT.json").read_text())
    assert committed["world_size"] == 2
    assert list(committed["files"]) == [f"tensors-0000{rank}.safetensors" for rank in (0, 1)]
    sizes = [file["size"] for file in committed["files"].values()]
    assert max(sizes) < 1.5 * min(sizes)  # each rank wrote its share
    shutil.copytree(parts.directory, tmp_path / "alone")
    alone = replace(parts, directory=tmp_path / "alone")
    result = run_job(parts, processes=2, on_event=lambda event: None)
    assert result.metrics["world_size"] == 2
    assert bench.files(parts.output) == bench.files(whole.output)
    assert bench.losses(parts) == bench.losses(whole)
    bench.run(alone)
    assert bench.losses(alone) == pytest.approx(bench.losses(whole), rel=1e-5)


def test_after_a_lack_of_memory_on_one_rank_both_go_on_with_fewer_rows(
    bench, tmp_path, monkeypatch
):
    (tmp_path / "small_rank.py").write_text(SMALL_RANK_1)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    jobs = [bench.job("pretrain", name, device_batch_size=2) for name in ("a", "b")]
    jobs[1] = replace(jobs[1], entry="small_rank")
    run_job(jobs[0], processes=2, on_event=lambda event: None)
    with pytest.raises(OutOfMemory):
        run_job(jobs[1], processes=2, on_event=lambda event: None)
    result = run_job(fitting(jobs[1]), processes=2, on_event=lambda event: None)
    assert result.metrics["device_batch_size"] == 1
    assert bench.losses(jobs[1]) == pytest.approx(bench.losses(jobs[0]), rel=1e-5)
