"""A disk that refuses to take all of it: the error has a number, and nothing half is there."""

import contextlib
import errno
import io
import resource

import numpy as np
import pytest

from nanochat_core.data import rows
from nanochat_core.data.array_files import new_array, write_array
from nanochat_core.data.conversations.chat_rows import ChatRows, make_piece, write_rows
from nanochat_core.data.row_files import Rows
from nanochat_core.data.shard_files import shard_name
from nanochat_core.data.token_files import TokenSet
from nanochat_core.data.tokens import tokenize_shard
from tests.unit.nanochat_core.data.test_rows import config

SHORT = [f"word{i}" for i in range(900)]  # less than a file's buffer holds


@contextlib.contextmanager
def files_of_at_most(size):
    """Inside, the kernel refuses every byte of a file after so many, with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_array_is_written_as_numpy_does(tmp_path):
    for array in (np.arange(9, dtype="<u4"), np.ones((3, 4), "<u2"), np.zeros((0, 5), "u1")):
        with new_array(tmp_path / "a.npy", array.dtype, array.shape) as file:
            write_array(file, array)
        expected = io.BytesIO()
        np.save(expected, array)
        assert (tmp_path / "a.npy").read_bytes() == expected.getvalue()


@pytest.mark.parametrize("num_values", [8, 10])
def test_a_caller_that_writes_another_number_of_values_is_noticed(tmp_path, num_values):
    array = np.arange(num_values, dtype="<u4")
    with (
        pytest.raises(AssertionError, match=f"^{4 * num_values} bytes of 36 were"),
        new_array(tmp_path / "a.npy", array.dtype, (9,)) as file,
    ):
        write_array(file, array)


@pytest.mark.parametrize("num_values", [1000, 1_000_000])  # in the buffer, and far more than it
def test_a_disk_that_is_full_is_an_error_with_a_number(tmp_path, num_values):
    with (
        files_of_at_most(512),
        pytest.raises(OSError, match="File too large") as error,
        (tmp_path / "ids").open("wb") as file,
    ):
        write_array(file, np.zeros(num_values, dtype="<u2"))
    assert error.value.errno == errno.EFBIG


def tokenize_one(directory, shards, tokenizer):
    tokenize_shard(
        shards / shard_name(0),
        tokenizer_directory=tokenizer,
        output=directory,
        scratch=directory.parent,
        dtype="uint16",
    )


@pytest.mark.parametrize("which", ["tokens", "lengths.npy"])
def test_tokens_that_do_not_fit_are_not_taken_for_done(
    tmp_path, write_shards, tokenizer_dir, which
):
    texts = SHORT if which == "tokens" else ["w"] * 900  # two tokens: lengths are the larger file
    shards = write_shards([texts, ["validation"]])
    whole, output = tmp_path / "whole", tmp_path / "output"
    for directory in (whole, output):
        directory.mkdir()
    tokenize_one(whole, shards, tokenizer_dir)
    size = (whole / f"shard_00000.{which}").stat().st_size
    with files_of_at_most(size - 100), pytest.raises(OSError, match="File too large") as error:
        tokenize_one(output, shards, tokenizer_dir)
    assert error.value.errno == errno.EFBIG
    left = [] if which == "tokens" else ["shard_00000.tokens"]
    assert [path.name for path in output.iterdir()] == left
    tokenize_one(output, shards, tokenizer_dir)
    for path in whole.iterdir():
        assert (output / path.name).read_bytes() == path.read_bytes()


def test_rows_that_do_not_fit_are_not_taken_for_done(make_job, tokens_dir):
    job = make_job("rows", {"tokens": tokens_dir}, rows=config())
    with files_of_at_most(4096), pytest.raises(OSError, match="File too large") as error:
        rows.run(job)
    assert error.value.errno == errno.EFBIG
    assert list(job.output.iterdir()) == []
    rows.run(job)
    assert Rows.open(job.output, "train").vocab_size == TokenSet.open(tokens_dir).vocab_size


@pytest.mark.parametrize("num_conversations", [600, 60_000])
def test_conversations_that_do_not_fit_are_not_taken_for_done(tmp_path, num_conversations):
    pieces = [make_piece([([7, 1, 2], [0, 1, 1])] * num_conversations, dtype="uint16")]
    with files_of_at_most(512), pytest.raises(OSError, match="File too large") as error:
        write_rows(pieces, tmp_path / "rows", row_len=3)
    assert error.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []
    write_rows(pieces, tmp_path / "rows", row_len=3)
    assert ChatRows.open(tmp_path / "rows").tokens.shape == (num_conversations, 3)


def test_packed_rows_that_do_not_fit_are_not_taken_for_done(tmp_path):
    """The files of ids do: a row's padding is what does not."""
    pieces = [make_piece([([7, 1, 2, 3], [0, 1, 1, 1])] * 300, dtype="uint16")]
    with files_of_at_most(2400), pytest.raises(OSError, match="File too large") as error:
        write_rows(pieces, tmp_path / "rows", row_len=5)
    assert error.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []
