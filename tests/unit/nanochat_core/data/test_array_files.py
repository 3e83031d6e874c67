"""A disk that refuses to take all of it: the error has a number, and nothing half is there."""

import contextlib
import errno
import io
import resource

import numpy as np
import pytest

from nanochat_core.data import rows
from nanochat_core.data.array_files import new_array, write_array
from nanochat_core.data.conversations.chat_rows import make_piece, write_rows
from nanochat_core.data.row_files import Rows
from nanochat_core.data.shard_files import shard_name
from nanochat_core.data.token_files import TokenSet
from nanochat_core.data.tokens import tokenize_shard
from tests.support.nanochat_core.data.fixtures import digests
from tests.unit.nanochat_core.data.test_rows import config

SHORT = [f"word{i}" for i in range(900)]  # less than a file's buffer holds


@contextlib.contextmanager
def files_of_at_most(size):
    """Inside, the kernel refuses every byte of a file after so many: an error with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            yield
        assert error.value.errno == errno.EFBIG
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


# Texts to tokenize, or the length of conversations, of a row, and their number -> the largest file
# that the disk takes, and what is left of an attempt on such a disk.
FULL = {
    "tokens": (SHORT, 2000, []),
    "lengths of two tokens each": (["w"] * 900, 3650, ["shard_00000.tokens"]),
    **{f"{count} conversations": ((3, 3, count), 512, []) for count in (600, 60_000)},
    "padding, though all ids fit": ((4, 5, 300), 2400, []),
}


@pytest.mark.parametrize(("what", "size", "left"), FULL.values(), ids=FULL)
def test_what_does_not_fit_is_not_taken_for_done(
    tmp_path, write_shards, tokenizer_dir, what, size, left
):
    def write(directory):
        if isinstance(what, list):
            shard = write_shards([what, ["validation"]]) / shard_name(0)
            given = {"tokenizer_directory": tokenizer_dir, "scratch": tmp_path, "dtype": "uint16"}
            tokenize_shard(shard, output=directory, **given)
        else:
            length, row_len, count = what
            talk = [7] * length, [0] + [1] * (length - 1)
            piece = make_piece([talk] * count, dtype="uint16")
            write_rows([piece], directory / "rows", row_len=row_len)

    whole, output = tmp_path / "whole", tmp_path / "output"
    for directory in (whole, output):
        directory.mkdir()
    write(whole)
    with files_of_at_most(size):
        write(output)
    assert [path.name for path in output.iterdir()] == left
    write(output)
    assert digests(output) == digests(whole)


def test_rows_that_do_not_fit_are_not_taken_for_done(make_job, tokens_dir):
    job = make_job("rows", {"tokens": tokens_dir}, rows=config())
    with files_of_at_most(4096):
        rows.run(job)
    assert list(job.output.iterdir()) == []
    rows.run(job)
    assert Rows.open(job.output, "train").vocab_size == TokenSet.open(tokens_dir).vocab_size
