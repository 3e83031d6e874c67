"""Pretraining on files of two runs says which of them do not fit, before it trains."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from nanochat_core.data.row_files import Rows
from nanochat_core.errors import DataError
from nanochat_core.job import Job
from nanochat_core.tokenizer.bpe import SPECIAL_TOKENS, Tokenizer

pytestmark = pytest.mark.torch
RunStage: TypeAlias = Callable[[Job], dict[str, Any]]
MakeJob: TypeAlias = Callable[..., Job]


def words_of(directory: Path) -> list[bytes]:
    """A tokenizer's ordinary tokens, by id."""
    tokenizer = Tokenizer.load(directory)
    return [tokenizer.decode_bytes([i]) for i in range(tokenizer.bos)]


def write_tokenizer(directory: Path, words: list[bytes]) -> Tokenizer:
    """A tokenizer of these ordinary tokens, on disk."""
    directory.mkdir()
    tokenizer = Tokenizer({word: i for i, word in enumerate(words)})
    tokenizer.save(directory)
    return tokenizer


def refused(job: Job, run_stage: RunStage) -> DataError:
    """What the stage says: one line and a hint, and nothing is written."""
    with pytest.raises(DataError) as error:
        run_stage(job)
    assert "\n" not in str(error.value)
    assert error.value.hint
    assert not any(job.output.iterdir())
    assert not any(job.checkpoints.iterdir())
    return error.value


@pytest.mark.parametrize("other", ["vocabulary", "order"])
def test_rows_of_another_tokenizer_are_named(
    data: dict[str, Path], make_job: MakeJob, run_stage: RunStage, tmp_path: Path, other: str
) -> None:
    """It has fewer words, or the same ones under other ids, which no shape would tell."""
    words = words_of(data["tokenizer"])
    changed = words[:400] if other == "vocabulary" else words[::-1]
    given = write_tokenizer(tmp_path / "tokenizer", changed).digest()[:12]
    inputs = {**data, "tokenizer": tmp_path / "tokenizer"}
    error = refused(make_job("pretrain", tmp_path / "job", inputs), run_stage)
    made_with = Rows.open(data["rows"], "train").tokenizer[:12]
    assert str(error) == f"the rows were made with tokenizer {made_with}, the one given is {given}"
    assert error.hint == "make tokens and rows again with this tokenizer"


def test_a_tokenizer_of_another_vocabulary_than_the_models_is_named(
    data: dict[str, Path], make_job: MakeJob, run_stage: RunStage, tmp_path: Path
) -> None:
    """Tokenizer, tokens and rows agree; the model was told another size."""
    write_tokenizer(tmp_path / "tokenizer", words_of(data["tokenizer"])[:400])
    inputs = {**data, "tokenizer": tmp_path / "tokenizer"}
    for name in ("tokens", "rows"):
        made = make_job(name, tmp_path / name, inputs)
        run_stage(made)
        inputs[name] = made.output
    error = refused(make_job("pretrain", tmp_path / "job", inputs), run_stage)
    size = 400 + len(SPECIAL_TOKENS)
    assert str(error) == f"the rows have vocab_size {size}, the model has 512"
    assert error.hint == "make the rows again with the model's settings"


def test_rows_of_another_length_than_the_models_are_named(
    data: dict[str, Path], make_job: MakeJob, run_stage: RunStage, tmp_path: Path
) -> None:
    rows = make_job("rows", tmp_path / "rows", data, section={"sequence_len": 64})
    run_stage(rows)
    inputs = {**data, "rows": rows.output}
    error = refused(make_job("pretrain", tmp_path / "job", inputs), run_stage)
    assert str(error) == "the rows have sequence_len 64, the model has 128"
