"""Decoding the plain way: the whole sequence through the model for every token. No cache, no batch.

It is the oracle that the engine is tested against, and the place to read what the engine computes.
"""

from collections.abc import Sequence

import torch

from nanochat_core.engine.answer import Answer, Completion, end_tokens
from nanochat_core.engine.sampling import row_keys, sample
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
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int,
    sample_index: int = 0,
) -> Completion:
    """One answer to the prompt `tokens`: what `Engine.complete` gives for the same seed.

    The settings from temperature on are those of `Draw`.
    """
    limit = min(max_tokens, model.config.sequence_len - len(tokens))
    answer = Answer(ToolTokens.of(tokenizer), ends=end_tokens(tokenizer), limit=limit)
    key = row_keys(torch.tensor([seed]), torch.tensor([sample_index]))
    while not answer.is_over:
        sequence = torch.tensor([[*tokens, *answer.ids]])
        logits = model(sequence)[:, -1]
        token = sample(
            logits,
            key,
            torch.tensor([sequence.size(1)]),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seen=torch.zeros_like(logits, dtype=torch.bool).scatter_(1, sequence, True),
        )
        answer.take(int(token))
    return answer.completion()
