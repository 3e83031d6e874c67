"""Fixtures of tests.support.nanochat_core.server.fixtures."""

from tests.support.nanochat_core.server.fixtures import live, model_dir

__all__ = ["live", "model_dir"]
