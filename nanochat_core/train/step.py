"""What every training loop must do alike: one step's gradients.

The loss of a step is the mean over all its targets on all ranks, so neither the world size nor the
device batch size changes it (beyond the order of a sum).
"""

import torch

from nanochat_core.model.gpt import GPT
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.distributed import World
from nanochat_core.runtime.heartbeat import HEART

IGNORE = -1  # target that carries no loss


def add_gradients(
    model: GPT,
    optimizer: Optimizer,
    tokens: torch.Tensor,  # (B, T+1) int64
    mask: torch.Tensor | None,  # (B, T+1), 1 where the token is learnt from; None: everywhere
    *,
    device_batch_size: int,
    world: World,
) -> torch.Tensor:
    """Give the optimizer the gradients of the mean loss over every rank's targets.

    Returns this rank's share of that mean, in nats, a scalar on the device: the sum over ranks is
    the loss. Nothing here waits for the device, nor for other ranks once the micro-steps begin.

    `tokens` are this rank's rows of the step; they pass through the model in micro-steps of
    `device_batch_size` rows.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if mask is not None:
        targets = targets.masked_fill(mask[:, 1:] == 0, IGNORE)
    count = world.sum((targets != IGNORE).sum().float()).clamp(min=1)
    total = torch.zeros((), device=tokens.device)
    for first in range(0, len(tokens), device_batch_size):
        HEART.beat("gradients")  # a whole step may take longer than a rank may be silent
        rows = slice(first, first + device_batch_size)
        loss = model.summed_loss(inputs[rows], targets[rows]) / count
        optimizer.backward(loss, last=first + device_batch_size >= len(tokens))
        total += loss.detach()
    optimizer.start_sums()
    return total
