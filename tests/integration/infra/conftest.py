"""The API of the server that tests share."""

from tests.support.deployments.fixtures import api

__all__ = ["api"]
