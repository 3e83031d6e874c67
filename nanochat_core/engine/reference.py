"""Generate an answer in the plainest way. Start here: the engine computes this, faster.

For each token the model reads the whole sequence again, the last position's logits give the next
token, and the token is appended. The rest of this folder saves the repetition:

- kv_cache/ stores the keys and values of tokens that were read, in pages, so that a step reads one
  token; equal prompts share their pages.
- scheduler.py and slots.py run many sequences in one step, and begin new ones as others end.
- runners/, kernels/ and native/ make a step itself fast on this machine.

What each of them must not change is defined here: tests compare every runner with this function,
and `python -m nanochat_core.engine MODEL_DIR` does so for one model and times both.
"""

from collections.abc import Sequence
from typing import Any

import torch

from nanochat_core.engine.answer import Answer, Completion, end_tokens
from nanochat_core.engine.requests import SamplingParams
from nanochat_core.engine.sampling import row_key, sample
from nanochat_core.engine.tools.calls import ToolTokens
from nanochat_core.model.gpt import GPT
from nanochat_core.tokenizer.bpe import Tokenizer


@torch.no_grad()
def generate_naive(
    model: GPT,
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    *,
    max_tokens: int,
    seed: int = 42,
    sample_index: int = 0,
    **settings: Any,
) -> Completion:
    """Return one answer to the prompt `tokens`, as `Engine.complete` does for the same seed.

    `settings` are those of `SamplingParams`.
    """
    params = SamplingParams(**settings)
    limit = min(max_tokens, model.config.sequence_len - len(tokens))
    answer = Answer(ToolTokens.of(tokenizer), ends=end_tokens(tokenizer), limit=limit)
    device = model.lm_head.weight.device
    # The random number of a token depends on seed, sample and position alone: see sampling.py.
    key = torch.tensor([row_key(seed, sample_index)], device=device)
    while not answer.is_over:
        sequence = torch.tensor([[*tokens, *answer.ids]], device=device)
        logits = model(sequence)[:, -1]
        position = torch.tensor([sequence.size(1)], device=device)
        # Sampled even if a tool's result forces the next token: `take` then ignores it.
        answer.take(int(sample(logits, key, position, params)))
    return answer.completion()
