"""Pretraining on files of two runs says which of them do not fit, before it trains."""

import pytest

from nanochat_core.errors import DataError
from nanochat_core.tokenizer.bpe import Tokenizer

pytestmark = pytest.mark.torch


def write_tokenizer(source, directory, some):
    """Write a tokenizer of some of another one's ordinary tokens; return its directory."""
    tokenizer = Tokenizer.load(source)
    tokens = [tokenizer.decode_bytes([i]) for i in range(tokenizer.bos)][some]
    directory.mkdir()
    Tokenizer({token: i for i, token in enumerate(tokens)}).save(directory)
    return directory


def test_what_does_not_fit_is_named_before_training(bench, tmp_path, transcript):
    def refused(head, **inputs):
        job = bench.job("pretrain", inputs=inputs)
        transcript.refused(head, DataError, bench.run, job)
        assert not any(job.output.iterdir())
        assert not any(job.checkpoints.iterdir())

    fewer = write_tokenizer(bench.data["tokenizer"], tmp_path / "fewer", slice(400))
    refused("a tokenizer of fewer tokens", tokenizer=fewer)
    # The same tokens under other ids, which no shape would show.
    other = write_tokenizer(bench.data["tokenizer"], tmp_path / "other", slice(None, None, -1))
    refused("a tokenizer of the same tokens in reverse", tokenizer=other)
    inputs = {"tokenizer": fewer}
    for name in ("tokens", "rows"):
        inputs[name] = bench.done(name, name, inputs=inputs)[0].output
    refused("a tokenizer, tokens and rows that agree, of another size than the model's", **inputs)
    rows, _ = bench.done("rows", "short", section={"sequence_len": 64})
    refused("rows of another length than the model's", rows=rows.output)
