"""What every training loop must do alike: one step's gradients.

The loss of a step is the mean over all its targets on all ranks, so neither the world size nor the
device batch size changes it (beyond the order of a sum).
"""

from collections.abc import Callable
from functools import partial

import torch

from nanochat_core.model.gpt import GPT
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import World
from nanochat_core.runtime.heartbeat import HEART

IGNORE = -1  # target that carries no loss


def accumulate_gradients(
    model: GPT,
    optimizer: Optimizer,
    tokens: torch.Tensor,  # (B, T+1) int64
    mask: torch.Tensor | None,  # (B, T+1), 1 where the token is learnt from; None: everywhere
    *,
    world: World,
) -> Callable[..., torch.Tensor]:
    """What gives the optimizer the gradients of the mean loss over every rank's targets.

    It is called with `device_batch_size`, and again with a smaller one where memory does not do:
    the rows pass through the model in micro-steps of so many. It returns this rank's share of the
    mean, in nats, a scalar on the device: the sum over ranks is the loss. It waits neither for the
    device nor for other ranks; they count their targets together here, before the first try.

    `tokens` are this rank's rows of the step.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if mask is not None:
        targets = targets.masked_fill(mask[:, 1:] == 0, IGNORE)
    count = world.sum((targets != IGNORE).sum().float()).clamp(min=1)
    return partial(_add_gradients, model, optimizer, inputs, targets, count)


def _add_gradients(
    model: GPT,
    optimizer: Optimizer,
    inputs: torch.Tensor,  # (B, T) int64
    targets: torch.Tensor,  # (B, T) int64
    count: torch.Tensor,  # scalar fp32: targets on all ranks
    *,
    device_batch_size: int,
) -> torch.Tensor:
    total = torch.zeros((), device=inputs.device)
    for first in range(0, len(inputs), device_batch_size):
        HEART.beat("gradients")  # a whole step may take longer than a rank may be silent
        rows = slice(first, first + device_batch_size)
        loss = model.summed_loss(inputs[rows], targets[rows]) / count
        optimizer.backward(loss, last=first + device_batch_size >= len(inputs))
        total += loss.detach()
    optimizer.start_reduce_scatter()
    return total
