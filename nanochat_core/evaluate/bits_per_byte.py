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
from nanochat_core.runtime.heartbeat import HEARTBEAT


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

    See `row_losses` for the rest.
    """
    nats, num_bytes = row_losses(
        model, rows, token_bytes, num_tokens=num_tokens, batch_size=batch_size, world=world
    )
    return float(nats.sum() / (math.log(2) * num_bytes.sum()))


@torch.no_grad()
def row_losses(
    model: GPT,
    rows: Rows,
    token_bytes: npt.NDArray[np.int32],
    *,
    num_tokens: int,
    batch_size: int,
    world: World,
) -> npt.NDArray[np.float64]:
    """Return the nats and the bytes of each of the first rows, (2, rows).

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
    # Rows of other ranks stay 0, so the sum over ranks below is a gather.
    found = torch.zeros(2, num_rows, dtype=torch.float64, device=device)
    for first in range(0, len(share), batch_size):
        HEARTBEAT.beat("evaluating")
        at = share[first : first + batch_size]
        # Kernels for the shape of a smaller last batch would take minutes to compile.
        filled = np.resize(at, batch_size) if first and model.is_compiled else at
        tokens = torch.from_numpy(rows.take(filled)).to(device)
        nats = model.token_losses(tokens[:, :-1], tokens[:, 1:])[: len(at)]  # (B, T)
        num_bytes = lengths[tokens[: len(at), 1:]]
        # A special token has no bytes, so its loss must not count either.
        found[0, at] = (nats.double() * (num_bytes > 0)).sum(dim=1)
        found[1, at] = num_bytes.sum(dim=1).double()
    world.sum(found)
    model.train(was_training)
    return found.cpu().numpy()
