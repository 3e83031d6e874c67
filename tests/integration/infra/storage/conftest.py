"""Fixtures of tests.support.infra.storage.fixtures."""

from tests.support.infra.storage.fixtures import rig

__all__ = ["rig"]
