"""A run may change its number of processes at every start: the rows stay, and so do the losses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.launch.torchrun import StageInterrupted, run_job
from nanochat_core.job import Job
from nanochat_core.runtime.progress import last_by_step, read_events

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def run_in_parts(job: Job, parts: list[tuple[int, int | None]]) -> None:
    """Run the job with so many processes for so many steps each; None: to its end."""
    for processes, steps in parts:
        if steps is None:
            run_job(job, processes=processes, on_event=lambda event: None)
        else:
            with pytest.raises(StageInterrupted):
                run_job(job, processes=processes, on_event=lambda event: None, steps=steps)


def losses(job: Job) -> dict[int, float]:
    return {s: v["loss"] for s, v in last_by_step(read_events(job.events), "step").items()}


def test_two_processes_then_one_then_four_train_as_one_does(
    data: dict[str, Path],
    make_job: Callable[..., Job],
    run_stage: Callable[[Job], dict[str, Any]],
    tmp_path: Path,
) -> None:
    alone = make_job("pretrain", tmp_path / "alone", data)
    run_stage(alone)
    job = make_job("pretrain", tmp_path / "job", data)
    run_in_parts(job, [(2, 2), (1, 2), (4, None)])
    assert losses(job).keys() == losses(alone).keys()
    assert losses(job) == pytest.approx(losses(alone), rel=1e-4)
