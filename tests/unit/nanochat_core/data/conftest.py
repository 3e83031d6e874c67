"""Fixtures of tests.support.nanochat_core.data.fixtures."""

from tests.support.nanochat_core.data.fixtures import (
    hub,
    make_job,
    shards_job,
    tokenizer_dir,
    tokens_dir,
    write_shards,
)

__all__ = ["hub", "make_job", "shards_job", "tokenizer_dir", "tokens_dir", "write_shards"]
