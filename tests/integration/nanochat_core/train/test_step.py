"""Ranks count a step's targets only where they must."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat_core.job import Job
from nanochat_core.runtime.hardware.distributed import World

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("stage", "sums"), [("pretrain", 1), ("sft", 2)])
def test_ranks_do_not_count_targets_that_are_known(
    stage: str,
    sums: int,
    models: dict[str, Path],
    make_job: Callable[..., Job],
    run_stage: Callable[[Job], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each position of a row of text is a target: the ranks sum the loss alone."""
    scalars: list[torch.Tensor] = []
    real = World.sum

    def count(world: World, x: torch.Tensor) -> torch.Tensor:
        if not x.dim():  # an evaluation sums several numbers
            scalars.append(x)
        return real(world, x)

    monkeypatch.setattr(World, "sum", count)
    metrics = run_stage(make_job(stage, tmp_path, models))
    assert len(scalars) == sums * metrics.get("steps", 6)
