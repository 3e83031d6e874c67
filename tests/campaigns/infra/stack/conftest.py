"""Fixtures of tests.support.infra.stack.fixtures."""

from tests.support.infra.stack.fixtures import live

__all__ = ["live"]
