"""A run may change its number of processes at every start: the rows stay, and so do the losses.

At depth 4, through the launcher. The initial weights have no zeros: from those of the recipe
rounding grows fivefold a step at first, whatever rounds (test_stages.py starts there).

That two ranks resume to the bit: reliability/test_kill_training.py.
"""

import dataclasses

import pytest

from flows.identity.fingerprint import REPOSITORY
from infra.launch.fitting import fitting
from infra.launch.torchrun import StageInterrupted, run_job
from nanochat_core.errors import OutOfMemory
from tests.support.nanochat_core.random_gpt import shape_of

pytestmark = pytest.mark.torch

STEPS = 10
MODEL = shape_of(32, 32, 128, 128, vocab_size=512)


def test_every_loss_is_that_of_one_process_with_two_then_one_then_four(bench):
    entry = "tests.support.nanochat_core.train.pretrain_from_noise"
    jobs = [bench.job("pretrain", name, section={"num_steps": STEPS}) for name in ("one", "parts")]
    one, parts = (
        dataclasses.replace(job, entry=entry, config={**job.config, "model": MODEL.tree()})
        for job in jobs
    )
    bench.run(one)
    start = {"on_event": lambda event: None, "root": REPOSITORY}
    for processes in (2, 1):
        with pytest.raises(StageInterrupted):
            run_job(parts, processes=processes, **start, steps=3)
    run_job(parts, processes=4, **start)
    losses = bench.losses(one)
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.5  # so that there is something to compare
    assert bench.losses(parts) == pytest.approx(losses, rel=1e-5)


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


def test_after_a_lack_of_memory_on_one_rank_both_go_on_with_fewer_rows(
    bench, tmp_path, monkeypatch
):
    (tmp_path / "small_rank.py").write_text(SMALL_RANK_1)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    jobs = [bench.job("pretrain", name, device_batch_size=2) for name in ("a", "b")]
    jobs[1] = dataclasses.replace(jobs[1], entry="small_rank")
    run_job(jobs[0], processes=2, on_event=lambda event: None)
    with pytest.raises(OutOfMemory):
        run_job(jobs[1], processes=2, on_event=lambda event: None)
    result = run_job(fitting(jobs[1]), processes=2, on_event=lambda event: None)
    assert result.metrics["device_batch_size"] == 1
    assert bench.losses(jobs[1]) == pytest.approx(bench.losses(jobs[0]), rel=1e-5)
