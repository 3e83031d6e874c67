"""Naive decoding: the whole sequence through the model for every token, without cache or batch.

Tests compare the engine with it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanochat_core.engine.answer import Answer, Completion, end_tokens
from nanochat_core.engine.requests import SamplingParams
from nanochat_core.engine.sampling import sample
from nanochat_core.engine.tools import ToolTokens
from nanochat_core.model.gpt import GPT
from nanochat_core.tokenizer.bpe import Tokenizer


@torch.no_grad()
def generate_naive(
    model: GPT,
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    *,
    max_tokens: int,
    seed: int,
    sample_index: int = 0,
    **settings: Any,
) -> Completion:
    """Return one answer to the prompt `tokens`, as `Engine.complete` does for the same seed.

    settings: those of `SamplingParams`.
    """
    params = SamplingParams(**settings)
    limit = min(max_tokens, model.config.sequence_len - len(tokens))
    answer = Answer(ToolTokens.of(tokenizer), ends=end_tokens(tokenizer), limit=limit)
    key = row_keys(torch.tensor([seed]), torch.tensor([sample_index]))
    while not answer.is_over:
        sequence = torch.tensor([[*tokens, *answer.ids]])
        # Sampled even if a tool forces the next token: `take` then ignores it.
        logits = model(sequence)[:, -1]
        seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, sequence, True)
        token = sample(logits, key, torch.tensor([sequence.size(1)]), params, seen)
        answer.take(int(token))
    return answer.completion()


def row_keys(seeds: Tensor, samples: Tensor) -> Tensor:
    """`row_key` of each row, all int64, written once more: SplitMix64 in numpy's uint64."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    keys = _mixed(seeds.numpy().astype(np.uint64) + golden)
    keys = _mixed(keys + samples.numpy().astype(np.uint64) * golden)
    return torch.from_numpy(keys.astype(np.int64))


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
