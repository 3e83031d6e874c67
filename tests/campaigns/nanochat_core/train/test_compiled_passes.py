"""Compiled training steps against eager ones."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nanochat_core.job import Job
from nanochat_core.runtime.progress import last_by_step, read_events

pytestmark = pytest.mark.torch


@pytest.mark.filterwarnings("ignore:Dynamo detected", "ignore:.*deprecated")
def test_compiled_passes_give_the_losses_of_eager_ones(
    data: dict[str, Path],
    make_job: Callable[..., Job],
    run_stage: Callable[[Job], dict[str, object]],
    tmp_path: Path,
) -> None:
    """Takes about a minute on a CPU, nearly all of it in the compiler."""
    losses: list[list[float]] = []
    for compiled in (False, True):
        job = make_job("pretrain", tmp_path / str(compiled), data, resources={"compile": compiled})
        run_stage(job)
        steps = last_by_step(read_events(job.events), "step")
        losses.append([values["loss"] for values in steps.values()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] != losses[1]  # else nothing was compiled
