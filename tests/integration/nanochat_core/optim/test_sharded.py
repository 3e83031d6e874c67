"""The optimizer divided among ranks: the same training, and a state that any number can take over.

Four processes are started once, join groups of two, four and three in turn, and check themselves.
"""

import math
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from infra.launch.torchrun import run_job
from nanochat_core.optim.groups import adamw_groups
from nanochat_core.optim.sharded_params import ShardedParams
from nanochat_core.runtime.hardware.distributed import ALONE, World
from tests.support.nanochat_core.optim.ranks import (
    CLIPPED,
    RATES,
    STEPS,
    check_loading,
    run,
    trained_alone,
)
from tests.support.small_job import small_job

pytestmark = pytest.mark.torch


class Scribbling(World):
    """The first of two ranks, whose sums leave nonsense in what the other owns."""

    begun: ClassVar[list[Tensor]] = []

    def start_sum_to_owners(self, tensor):
        self.begun.append(tensor.clone())
        tensor.chunk(2)[1].fill_(math.nan)


@pytest.mark.parametrize("by_row", [False, True])
def test_what_fills_up_the_last_slice_is_zero_in_every_sum(by_row):
    world = Scribbling(rank=0, local_rank=0, size=2)
    Scribbling.begun.clear()
    parameters = {name: nn.Parameter(torch.ones(3, 2)) for name in "abc"}
    stack = ShardedParams(
        parameters,
        group=adamw_groups(RATES)[0] if by_row else None,
        lr=0.0,
        state={},
        dtype=torch.float32,
        world=world,
    )
    for _ in range(2):
        for part in stack.parts:
            part.parameter.grad = torch.ones(3, 2)
            stack.take_gradient(part)
        stack.start_reduce_scatter()
        stack.drop_gradients()
    filled = 9 if by_row else 3
    for begun in Scribbling.begun:
        assert len(begun) == filled + 1
        assert torch.equal(begun[:filled], torch.ones_like(begun[:filled]))
        assert not begun[filled:].any()


def test_ranks_train_as_one_and_any_number_takes_over_what_two_saved(tmp_path, monkeypatch):
    save_file(trained_alone(RATES, STEPS), tmp_path / "plain.safetensors")
    save_file(trained_alone(CLIPPED, STEPS), tmp_path / "clipped.safetensors")
    save_file(trained_alone(RATES, STEPS + 2), tmp_path / "later.safetensors")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))  # `run` is in `tests`
    run_job(small_job(tmp_path, entry=run.__module__), processes=4, on_event=lambda event: None)
    check_loading(ALONE, tmp_path, "fp32")
    check_loading(ALONE, tmp_path, "bf16")
