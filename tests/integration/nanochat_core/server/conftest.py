"""Fixtures of tests.support.nanochat_core.server.fixtures."""

from tests.support.nanochat_core.server.fixtures import client, live, model_dir, openai

__all__ = ["client", "live", "model_dir", "openai"]
