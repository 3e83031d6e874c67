"""Fixtures of the engine's tests, and of the server's a model on disk."""

from tests.support.nanochat_core.engine.fixtures import make_model, tokenizer
from tests.support.nanochat_core.server.fixtures import model_dir

__all__ = ["make_model", "model_dir", "tokenizer"]
