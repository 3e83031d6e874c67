"""Fixtures of tests.support.nanochat_core.engine.fixtures."""

from tests.support.nanochat_core.engine.fixtures import make_model, tokenizer

__all__ = ["make_model", "tokenizer"]
