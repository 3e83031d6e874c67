"""Split a step's rows into micro-steps, for pretraining and for training on conversations.

The loss of a step is the mean over all its targets on all ranks, so neither the world size nor the
device batch size changes it (beyond the order of a sum).
"""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from nanochat_core.model.gpt import GPT
from nanochat_core.runtime.hardware.distributed import World
from nanochat_core.runtime.heartbeat import HEARTBEAT

IGNORE = -1  # target that carries no loss


def micro_steps(
    model: GPT,
    tokens: Tensor,  # (B, T+1) int64, this rank's rows of the step
    mask: Tensor | None,  # (B, T+1), 1 where the token is learnt from; None: everywhere
    *,
    device_batch_size: int,
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield inputs, targets (R, T) and whether they are the last, `device_batch_size` rows a time.

    Yields nothing if this rank has no rows.
    """
    # Position t predicts token t+1.
    # Contiguous like a padded micro-step: kernels are compiled for strides too.
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:]
    if mask is not None:
        targets = targets.masked_fill(mask[:, 1:] == 0, IGNORE)
    for first in range(0, len(inputs), device_batch_size):
        HEARTBEAT.beat("gradients")  # a whole step may take longer than a rank may be silent
        rows = slice(first, first + device_batch_size)
        some, wanted = inputs[rows], targets[rows]
        missing = device_batch_size - len(some)
        if missing and model.is_compiled:  # kernels for another shape would take minutes to compile
            some = F.pad(some, (0, 0, 0, missing))
            wanted = F.pad(wanted, (0, 0, 0, missing), value=IGNORE)
        yield some, wanted, first + device_batch_size >= len(inputs)


def share_of_targets(mask: Tensor, world: World) -> Tensor:
    """Return the share of one target in the step's mean loss: a scalar. Collective.

    `mask`: see `micro_steps`. Ranks have unequal numbers of targets, so the mean of their means
    would not be the mean.
    """
    return world.sum((mask[:, 1:] != 0).sum().float()).clamp(min=1).reciprocal()
