"""A run may change its number of processes at every start: the rows stay, and so do the losses.

At depth 4, through the launcher. The initial weights have no zeros: from those of the recipe
rounding grows fivefold a step at first, whatever rounds (test_two_ranks.py starts there).
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.identity.fingerprint import REPOSITORY
from infra.launch.torchrun import StageInterrupted, run_job
from nanochat_core.config import ModelConfig
from nanochat_core.job import Job
from nanochat_core.runtime.progress import last_by_step, read_events

pytestmark = pytest.mark.torch

STEPS = 10
MODEL = ModelConfig(
    depth=4,
    width=64,
    num_heads=4,
    num_kv_heads=2,
    sequence_len=128,
    vocab_size=512,
    windows=(32, 32, 128, 128),
)


@pytest.fixture(scope="module")
def job_in(data: dict[str, Path], make_job: Callable[..., Job]) -> Callable[[Path], Job]:
    """Makes the job in a directory."""

    def make(directory: Path) -> Job:
        section = {"num_steps": STEPS}
        job = make_job("pretrain", directory, data, section=section)
        entry = "tests.support.nanochat_core.train.pretrain_from_noise"
        return dataclasses.replace(job, entry=entry, config={**job.config, "model": MODEL.tree()})

    return make


@pytest.fixture(scope="module")
def alone(
    job_in: Callable[[Path], Job],
    run_stage: Callable[[Job], dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[int, float]:
    """The losses of one process that is never stopped, by step."""
    job = job_in(tmp_path_factory.mktemp("alone"))
    run_stage(job)
    return losses(job)


def losses(job: Job) -> dict[int, float]:
    return {s: v["loss"] for s, v in last_by_step(read_events(job.events), "step").items()}


def run_in_parts(job: Job, parts: list[tuple[int, int | None]]) -> None:
    """Run the job with so many processes for so many steps each; None: to its end."""
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
def test_every_loss_is_that_of_one_process(
    parts: list[tuple[int, int | None]],
    alone: dict[int, float],
    job_in: Callable[[Path], Job],
    tmp_path: Path,
) -> None:
    job = job_in(tmp_path)
    run_in_parts(job, parts)
    assert list(alone) == list(range(1, STEPS + 1))
    assert alone[STEPS] < alone[1] - 0.5  # so that there is something to compare
    assert losses(job) == pytest.approx(alone, rel=1e-5)
