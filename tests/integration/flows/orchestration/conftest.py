"""Prefect's API, flows of toys (test_pipeline.py) and callers of a pool (test_dispatch.py)."""

from tests.integration.flows.orchestration.test_dispatch import make_caller
from tests.integration.flows.orchestration.test_pipeline import run_toys
from tests.support.deployments.fixtures import api

__all__ = ["api", "make_caller", "run_toys"]
