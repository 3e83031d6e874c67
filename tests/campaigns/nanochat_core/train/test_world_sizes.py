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
from tests.support.nanochat_core.train.fixtures import Bench

pytestmark = pytest.mark.torch

STEPS = 10
MODEL = shape_of(32, 32, 128, 128, vocab_size=512)


def job_in(bench):
    """Return the job in a bench's directory."""
    job = bench.job("pretrain", section={"num_steps": STEPS})
    entry = "tests.support.nanochat_core.train.pretrain_from_noise"
    return dataclasses.replace(job, entry=entry, config={**job.config, "model": MODEL.tree()})


def losses(job):
    return {step: values["loss"] for step, values in Bench.values(job).items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of one process that is never stopped, by step."""
    job = job_in(Bench(tmp_path_factory, tmp_path_factory.mktemp("alone")))
    Bench.run(job)
    return losses(job)


def run_in_parts(job, parts):
    """Run the job with so many processes for so many steps each; None means to its end."""
    for processes, steps in parts:
        start = {"processes": processes, "on_event": lambda event: None, "root": REPOSITORY}
        if steps is None:
            run_job(job, **start)
        else:
            with pytest.raises(StageInterrupted):
                run_job(job, **start, steps=steps)


@pytest.mark.parametrize(
    "parts",
    [[(2, None)], [(2, 3), (1, 3), (4, None)]],
    ids=["two processes", "two, then one, then four"],
)
def test_every_loss_is_that_of_one_process(parts, alone, bench):
    job = job_in(bench)
    run_in_parts(job, parts)
    assert list(alone) == list(range(1, STEPS + 1))
    assert alone[STEPS] < alone[1] - 0.5  # so that there is something to compare
    assert losses(job) == pytest.approx(alone, rel=1e-5)


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
