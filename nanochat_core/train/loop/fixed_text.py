"""The loss of a model on a text that no stage trains on.

It shows whether weights, tokenizer and numerics belong together, whatever a user trains on: the
stage that makes a model records it (lineage.py), and the next one compares (sanity_checks.py).
"""

import torch

from nanochat_core.model.gpt import GPT
from nanochat_core.runtime.heartbeat import HEARTBEAT
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.kinds_of_text import read_kinds
from nanochat_core.train.loop.step import IGNORE

MAX_ROWS = 4
DECIMALS = 3  # kernels and batch sizes change the next


@torch.no_grad()
def fixed_text_loss(
    model: GPT, tokenizer: Tokenizer, *, batch_size: int, renumbered: bool = False
) -> float:
    """Return nats a token on English text of ours, rounded.

    `batch_size`: the rows that a compiled model is compiled for. `renumbered`: with the ids of
    ordinary tokens in reverse order. Not collective: every rank that calls it computes the same.
    Restores the model's mode.
    """
    kinds, length = read_kinds(), model.config.sequence_len
    ids = tokenizer.encode(f"{kinds['english']}\n\n{kinds['science']}")
    if renumbered:
        ids = [tokenizer.bos - 1 - i for i in ids]
    parts = [ids[i : i + length] for i in range(0, len(ids), length)][:MAX_ROWS]
    # A row at a time, which memory holds; kernels for another shape would take minutes to compile.
    num_rows = batch_size if model.is_compiled else 1
    was_training, device = model.training, model.lm_head.weight.device
    model.eval()
    nats = 0.0
    for part in parts:
        HEARTBEAT.beat("evaluating")
        tokens = torch.full((num_rows, length + 1), tokenizer.bos, device=device)
        targets = torch.full((num_rows, length), IGNORE, device=device)
        tokens[0, 1 : len(part) + 1] = targets[0, : len(part)] = torch.tensor(part, device=device)
        nats += float(model.token_losses(tokens[:, :-1], targets).double().sum())
    model.train(was_training)
    return round(nats / sum(map(len, parts)), DECIMALS)
