"""The gradients of a step whose targets are known are those of one that counts them."""

import pytest
import torch

from nanochat_core.model.gpt import GPT
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import ALONE, World
from nanochat_core.scaling import numerics, run_for_depth
from nanochat_core.train.loop.step import accumulate_gradients
from tests.support.nanochat_core.optim.ranks import CONFIG

pytestmark = pytest.mark.torch


def test_ranks_do_not_count_targets_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(60, (3, 17), generator=torch.Generator().manual_seed(1))

    def step(num_targets: int | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = GPT(CONFIG, numerics("fp32"))
        model.init_weights(1)
        optimizer = Optimizer(model, run_for_depth(2).optimizer, precision="fp32", world=ALONE)
        loss = accumulate_gradients(
            model,
            optimizer,
            tokens,
            None,
            device_batch_size=2,
            world=ALONE,
            num_targets=num_targets,
        )
        return loss, optimizer.gradients()

    sums: list[torch.Tensor] = []
    real = World.sum
    monkeypatch.setattr(World, "sum", lambda world, x: sums.append(x) or real(world, x))
    counted = step(None)
    known = step(48)

    assert len(sums) == 2 + 1  # the count and the loss, then the loss
    assert torch.equal(known[0], counted[0])
    assert known[1].keys() == counted[1].keys()
    assert all(torch.equal(gradient, counted[1][name]) for name, gradient in known[1].items())
