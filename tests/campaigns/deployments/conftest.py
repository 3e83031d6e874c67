"""Fixtures of tests.support.deployments.fixtures."""

from tests.support.deployments.fixtures import api, deploy, posted

__all__ = ["api", "deploy", "posted"]
