"""Compute one step's gradients, for pretraining and for training on conversations.

The loss of a step is the mean over all its targets on all ranks, so neither the world size nor the
device batch size changes it (beyond the order of a sum).
"""

import torch
import torch.nn.functional as F

from nanochat_core.model.gpt import GPT
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import World
from nanochat_core.runtime.heartbeat import HEARTBEAT

IGNORE = -1  # target that carries no loss


def accumulate_gradients(
    model: GPT,
    optimizer: Optimizer,
    tokens: torch.Tensor,  # (B, T+1) int64
    mask: torch.Tensor | None,  # (B, T+1), 1 where the token is learnt from; None: everywhere
    *,
    device_batch_size: int,
    world: World,
    num_targets: int | None = None,
) -> torch.Tensor:
    """Give the optimizer the gradients of the mean loss over all ranks; return the loss.

    `tokens` are this rank's rows of the step, of which a micro-step takes `device_batch_size`. The
    loss is in nats, a scalar on the device, which is not waited for. `num_targets`: the step's
    targets on all ranks, where the caller knows them; None means that the ranks count them.
    Collective.
    """
    # Position t predicts token t+1.
    # Contiguous like a padded micro-step: kernels are compiled for strides too.
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:]
    if mask is not None:
        targets = targets.masked_fill(mask[:, 1:] == 0, IGNORE)
    # Ranks have unequal numbers of targets, so the mean of their means would not be the mean.
    if num_targets is None:
        count = world.sum((targets != IGNORE).sum().float()).clamp(min=1)
    else:
        count = torch.full((), float(num_targets), device=tokens.device)
    share = count.reciprocal()  # of each target in the mean
    total = torch.zeros((), device=inputs.device)
    for first in range(0, len(inputs), device_batch_size):
        HEARTBEAT.beat("gradients")  # a whole step may take longer than a rank may be silent
        rows = slice(first, first + device_batch_size)
        tokens, wanted = inputs[rows], targets[rows]
        missing = device_batch_size - len(tokens)
        if missing and model.is_compiled:  # kernels for another shape would take minutes to compile
            tokens = F.pad(tokens, (0, 0, 0, missing))
            wanted = F.pad(wanted, (0, 0, 0, missing), value=IGNORE)
        # A share of all targets of the step, so that gradients of micro-steps and ranks just add.
        loss = model.summed_loss(tokens, wanted, share)
        # At the last one the optimizer starts to sum a layer's gradients while others are computed.
        optimizer.backward(loss, last=first + device_batch_size >= len(inputs))
        total += loss.detach()
    optimizer.start_reduce_scatter()
    return world.sum(total)
