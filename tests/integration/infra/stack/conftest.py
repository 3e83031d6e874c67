"""Fixtures of stacks, and of the API of the server that tests share."""

from tests.support.deployments.fixtures import api
from tests.support.infra.stack.fixtures import live

__all__ = ["api", "live"]
