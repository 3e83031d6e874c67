"""Fixture of tests.support.nanochat_core.train.fixtures."""

from tests.support.nanochat_core.train.fixtures import bench

__all__ = ["bench"]
