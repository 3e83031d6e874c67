"""Pretraining on files of two runs says which of them do not fit, before it trains."""

import pytest

from nanochat_core.data.row_files import Rows
from nanochat_core.errors import DataError
from nanochat_core.tokenizer.bpe import SPECIAL_TOKENS, Tokenizer

pytestmark = pytest.mark.torch


def write_tokenizer(source, directory, some):
    """Write a tokenizer of some of another one's ordinary tokens."""
    tokenizer = Tokenizer.load(source)
    tokens = [tokenizer.decode_bytes([i]) for i in range(tokenizer.bos)][some]
    directory.mkdir()
    tokenizer = Tokenizer({token: i for i, token in enumerate(tokens)})
    tokenizer.save(directory)
    return tokenizer


def refused(bench, **inputs):
    """Return the error of the stage: one line and a hint; nothing is written."""
    job = bench.job("pretrain", inputs=inputs)
    with pytest.raises(DataError) as error:
        bench.run(job)
    assert "\n" not in str(error.value)
    assert error.value.hint
    assert not any(job.output.iterdir())
    assert not any(job.checkpoints.iterdir())
    return error.value


@pytest.mark.parametrize("some", [slice(400), slice(None, None, -1)], ids=["fewer", "in reverse"])
def test_rows_of_another_tokenizer_are_named(bench, tmp_path, some):
    """It has fewer tokens, or the same ones under other ids, which no shape would show."""
    other = write_tokenizer(bench.data["tokenizer"], tmp_path / "tokenizer", some)
    given = other.digest()[:12]
    error = refused(bench, tokenizer=tmp_path / "tokenizer")
    made_with = Rows.open(bench.data["rows"], "train").tokenizer[:12]
    assert str(error) == f"the rows were made with tokenizer {made_with}, the one given is {given}"
    assert error.hint == "make tokens and rows again with this tokenizer"


def test_a_tokenizer_of_another_vocabulary_than_the_models_is_named(bench, tmp_path):
    """Tokenizer, tokens and rows agree; the model has another size."""
    write_tokenizer(bench.data["tokenizer"], tmp_path / "tokenizer", slice(400))
    inputs = {"tokenizer": tmp_path / "tokenizer"}
    for name in ("tokens", "rows"):
        inputs[name] = bench.done(name, name, inputs=inputs)[0].output
    error = refused(bench, **inputs)
    size = 400 + len(SPECIAL_TOKENS)
    assert str(error) == f"the rows have vocab_size {size}, the model has 512"
    assert error.hint == "make the rows again with the model's settings"


def test_rows_of_another_length_than_the_models_are_named(bench):
    rows, _ = bench.done("rows", "rows", section={"sequence_len": 64})
    error = refused(bench, rows=rows.output)
    assert str(error) == "the rows have sequence_len 64, the model has 128"
