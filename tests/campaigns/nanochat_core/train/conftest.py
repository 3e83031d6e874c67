"""Fixtures of tests.support.nanochat_core.train.fixtures."""

from tests.support.nanochat_core.train.fixtures import bench, pipeline

__all__ = ["bench", "pipeline"]
