"""A small random chat model, for tests that talk to one."""

from pathlib import Path

import torch

from nanochat_core import scaling
from nanochat_core.config import ModelConfig
from nanochat_core.model.checkpoint import save_model
from nanochat_core.model.gpt import GPT
from nanochat_core.tokenizer.bpe import SPECIAL_TOKENS, Tokenizer

CONTEXT = 1024


def write_chat_model(directory: Path) -> None:
    """A model directory whose greedy answers never end: special tokens are never the likeliest."""
    (tokenizer_directory := directory / "tokenizer").mkdir()
    words = " ".join(f"word{i} caf\u00e9{i}" for i in range(400))
    tokenizer = Tokenizer.train(iter([words]), vocab_size=300)
    tokenizer.save(tokenizer_directory)
    config = ModelConfig(
        depth=2,
        width=64,
        num_heads=4,
        num_kv_heads=4,
        sequence_len=CONTEXT,
        vocab_size=300,
        windows=(CONTEXT, CONTEXT),
    )
    gpt = GPT(config, scaling.numerics("fp32"))
    gpt.init_weights(0)
    with torch.no_grad():
        for parameter in (gpt.lm_head.weight, *gpt.transformer.h.parameters()):
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
        gpt.lm_head.weight[300 - len(SPECIAL_TOKENS) :] = 0
    save_model(directory, gpt, tokenizer=tokenizer_directory, optimizer={}, made_by="test")
