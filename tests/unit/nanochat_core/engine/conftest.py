"""A fixture of tests.support.nanochat_core.engine.fixtures."""

from tests.support.nanochat_core.engine.fixtures import tokenizer

__all__ = ["tokenizer"]
