"""Bits per byte: a model's loss on text, in a unit that does not depend on the vocabulary.

It is the sum of the losses in bits over the number of bytes of the targets' text. Targets without
text (special tokens) count in neither. It is measured on the first rows of a split, the same for
any world size and device batch.
"""

import math

import numpy as np
import numpy.typing as npt
import torch

from nanochat_core.data.row_files import Rows
from nanochat_core.model.gpt import GPT
from nanochat_core.runtime.hardware.distributed import World
from nanochat_core.runtime.heartbeat import HEART


def bits_per_byte(
    model: GPT,
    rows: Rows,
    token_bytes: npt.NDArray[np.int32],
    *,
    num_tokens: int,
    batch_size: int,
    world: World,
) -> float:
    """Return bits per byte over the first `num_tokens` targets of `rows`: whole rows, at least one.

    See `row_sums` for the rest.
    """
    sums = row_sums(
        model, rows, token_bytes, num_tokens=num_tokens, batch_size=batch_size, world=world
    )
    return sums[1] / (math.log(2) * sums[2])


@torch.no_grad()
def row_sums(
    model: GPT,
    rows: Rows,
    token_bytes: npt.NDArray[np.int32],
    *,
    num_tokens: int,
    batch_size: int,
    world: World,
) -> tuple[float, ...]:
    """Return sums over rows: 1, nats, bytes, and nats^2, nats * bytes, bytes^2 for the variance.

    `token_bytes` (V,): the bytes of each id, 0 for special tokens. The ranks share the rows,
    `batch_size` at a time, and all return the same numbers. Restores the model's mode. Collective.
    """
    was_training = model.training
    model.eval()
    device = model.lm_head.weight.device
    lengths = torch.from_numpy(token_bytes).to(device)
    num_rows = min(rows.num_rows, max(1, num_tokens // rows.sequence_len))
    # Strided, so that the shares of the ranks differ by one row at most.
    share = np.arange(world.rank, num_rows, world.size)
    # fp64, so that the order of the additions, which depends on the ranks, hardly matters.
    sums = torch.zeros(6, dtype=torch.float64, device=device)
    for first in range(0, len(share), batch_size):
        HEART.beat("evaluating")
        at = share[first : first + batch_size]
        # Kernels for the shape of a smaller last batch would take minutes to compile.
        filled = np.resize(at, batch_size) if first and model.is_compiled else at
        tokens = torch.from_numpy(rows.take(filled)).to(device)
        nats = model.token_losses(tokens[:, :-1], tokens[:, 1:])[: len(at)]  # (B, T)
        targets = tokens[: len(at), 1:]
        num_bytes = lengths[targets]
        # A special token has no bytes, so its loss must not count either.
        n = (nats.double() * (num_bytes > 0)).sum(dim=1)  # (B,)
        b = num_bytes.sum(dim=1).double()
        sums += torch.stack([torch.ones_like(n), n, b, n * n, n * b, b * b]).sum(dim=1)
    world.sum(sums)
    model.train(was_training)
    return tuple(sums.tolist())
