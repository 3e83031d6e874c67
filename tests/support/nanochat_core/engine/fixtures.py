"""A byte tokenizer and small random models for the engine's tests."""

from collections.abc import Callable

import pytest

from nanochat_core.scaling import numerics
from nanochat_core.tokenizer.bpe import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """One token a byte, and the special tokens: 265 ids."""
    return Tokenizer({bytes([i]): i for i in range(256)})


@pytest.fixture(scope="session")
def make_model() -> Callable[..., object]:
    """Build a small model whose every weight is random, so that each part of it matters."""
    import torch

    from nanochat_core.config import ModelConfig
    from nanochat_core.model.gpt import GPT

    def make(
        *, seed: int = 0, windows: tuple[int, ...] = (16, 16, 64), num_kv_heads: int = 2
    ) -> GPT:
        config = ModelConfig(
            depth=len(windows),
            width=32,
            num_heads=2,
            num_kv_heads=num_kv_heads,
            sequence_len=64,
            vocab_size=265,
            windows=windows,
        )
        model = GPT(config, numerics("fp32"))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.3, generator=generator)
        return model.eval()

    return make
