"""Fixtures of tests.support.nanochat_core.train.fixtures."""

from tests.support.nanochat_core.train.fixtures import config, data, make_job, models, run_stage

__all__ = ["config", "data", "make_job", "models", "run_stage"]
