"""A small random model that is served."""

import pytest

from nanochat_core.tokenizer.bpe import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """One token a byte, and the special tokens: 265 ids."""
    return Tokenizer({bytes([i]): i for i in range(256)})


@pytest.fixture(scope="session")
def model():
    """A random model of a long context, slow enough to be interrupted."""
    import torch

    from nanochat_core.config import ModelConfig
    from nanochat_core.model.gpt import GPT
    from nanochat_core.scaling import numerics

    config = ModelConfig(
        depth=2,
        width=32,
        num_heads=2,
        num_kv_heads=2,
        sequence_len=4096,
        vocab_size=265,
        windows=(64, 4096),
        residual_scalars=True,
        value_embeds=True,
        smear=True,
        backout=True,
    )
    model = GPT(config, numerics("fp32"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
        model.lm_head.weight[256:] = 0.0  # special tokens are unlikely: answers are long
    return model.eval()


@pytest.fixture(scope="session")
def engine(model, tokenizer):
    """The engine of that model."""
    from nanochat_core.engine.engine import Engine

    return Engine(model, tokenizer)
