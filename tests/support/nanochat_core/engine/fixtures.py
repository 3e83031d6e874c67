"""A byte tokenizer and small random models for the engine's tests."""

from collections.abc import Callable

import pytest

from nanochat_core.tokenizer.bpe import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """One token a byte, and the special tokens: 265 ids."""
    return Tokenizer({bytes([i]): i for i in range(256)})


@pytest.fixture(scope="session")
def make_model() -> Callable[..., object]:
    """make_model(seed=, windows=, num_kv_heads=): a small model with random weights."""
    from tests.support.nanochat_core.random_gpt import random_gpt  # torch is loaded here

    return lambda *, windows=(16, 16, 64), **shape: random_gpt(*windows, sequence_len=64, **shape)
