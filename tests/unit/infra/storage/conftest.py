"""Fixtures of tests.support.infra.storage.fixtures."""

from tests.support.infra.storage.fixtures import fake, large, make_fake, small_parts

__all__ = ["fake", "large", "make_fake", "small_parts"]
