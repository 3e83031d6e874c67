"""Fixtures of tests.support.nanochat_core.evaluate.fixtures."""

from tests.support.nanochat_core.evaluate.fixtures import (
    make_job,
    model,
    model_dir,
    rows_dir,
    task_data_dir,
    tokenizer,
)

__all__ = ["make_job", "model", "model_dir", "rows_dir", "task_data_dir", "tokenizer"]
