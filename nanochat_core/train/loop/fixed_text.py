"""The loss of a model on a text that no stage trains on.

It shows whether weights, tokenizer and numerics belong together, whatever a user trains on: the
stage that makes a model records it (lineage.py), and the next one compares (sanity_checks.py).
"""

import contextlib
import hashlib

import torch

from nanochat_core.model.gpt import GPT
from nanochat_core.runtime.heartbeat import HEARTBEAT
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.kinds_of_text import read_kinds
from nanochat_core.train.loop.step import IGNORE

MAX_ROWS = 4
DECIMALS = 3  # kernels change the next
RULE = 1  # increase it if `fixed_text_loss` measures the same text in another way


def fixed_text_digest() -> str:
    """Return 64 hex digits of what `fixed_text_loss` measures: losses of two are not comparable."""
    return hashlib.sha256(repr((RULE, MAX_ROWS, _text())).encode()).hexdigest()


@torch.no_grad()
def fixed_text_loss(model: GPT, tokenizer: Tokenizer) -> float:
    """Return nats a token on English text of ours, rounded.

    Not collective: every rank that calls it computes the same. Restores the model's mode.
    """
    length = model.config.sequence_len
    ids = tokenizer.encode(_text())
    parts = [ids[i : i + length] for i in range(0, len(ids), length)][:MAX_ROWS]
    was_training, device = model.training, model.lm_head.weight.device
    model.eval()
    nats = 0.0
    # Eager: these few rows are not worth kernels, which take minutes for a shape that no step has,
    # on rank 0 alone while the others wait; another shape would also change the kernels of steps.
    # A model on a CPU that is not compiled does without an import of torch's compiler.
    is_eager = not model.is_compiled and device.type == "cpu"
    eager = contextlib.nullcontext() if is_eager else torch.compiler.set_stance("force_eager")
    with eager:
        for part in parts:  # a row at a time, which memory holds
            HEARTBEAT.beat("evaluating")
            tokens = torch.full((1, length + 1), tokenizer.bos, device=device)
            targets = torch.full((1, length), IGNORE, device=device)
            row = torch.tensor(part, device=device)
            tokens[0, 1 : len(part) + 1] = targets[0, : len(part)] = row
            nats += float(model.token_losses(tokens[:, :-1], targets).double().sum())
    model.train(was_training)
    return round(nats / sum(map(len, parts)), DECIMALS)


def _text() -> str:
    kinds = read_kinds()
    return f"{kinds['english']}\n\n{kinds['science']}"
