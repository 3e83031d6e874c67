import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_core.data.row_files import BLOCK_ROWS, Rows, permutation, write_index

WORLDS = (1, 2, 4, 8)


def numbered(num_rows, *, dtype="<u2"):
    """Rows of which all ids are their number."""
    ids = np.repeat(np.arange(num_rows, dtype=dtype)[:, None], 4, axis=1)
    return Rows(ids=ids, vocab_size=2**16, tokenizer="")


def trained(rows, step, rows_per_step, *, world):
    """Numbers of the rows of a step, over all ranks."""
    shares = (rows.batch(step, rows_per_step, seed=42, rank=r, world=world) for r in range(world))
    return sorted(number for share in shares for number in share[:, 0].tolist())


@settings(deadline=None)
@given(st.integers(1, 2500), st.integers(1, 300), st.integers(0, 50), st.sampled_from(WORLDS))
def test_ranks_share_the_rows_of_a_step_at_any_world_size(num_rows, rows_per_step, step, world):
    rows = numbered(num_rows)
    ids = rows.step_ids(step, rows_per_step, 7)
    assert len(ids) == rows_per_step
    for rank in range(world):
        share = rows.batch(step, rows_per_step, seed=7, rank=rank, world=world)
        assert share[:, 0].tolist() == ids[rank::world].tolist()


@pytest.fixture
def directory(tmp_path):
    """Rows on disk, more than two blocks of them."""
    num_rows = 2 * BLOCK_ROWS + 100
    numbered(num_rows).ids.tofile(tmp_path / "train.rows")
    write_index(
        tmp_path,
        {
            "sequence_len": 3,
            "dtype": "uint16",
            "vocab_size": 2**16,
            "tokenizer": "",
            "num_train": num_rows,
            "num_val": 1,
        },
    )
    return tmp_path


@pytest.mark.parametrize(("before", "after"), [(1, 8), (8, 2)])
def test_training_that_stops_at_any_step_resumes_with_the_rows_it_would_have_had(
    directory, before, after
):
    rows = Rows.open(directory, "train")
    steps = range(30)  # of 150 rows: two epochs
    whole = [trained(rows, s, 150, world=before) for s in steps]
    for stop in steps:
        permutation.cache_clear()  # as a new process begins
        again = Rows.open(directory, "train")
        assert trained(again, stop, 150, world=after) == whole[stop]


def test_a_batch_has_the_type_of_the_file(directory):
    assert Rows.open(directory, "train").batch(0, 4, seed=1).dtype == np.dtype("<u2")
    assert numbered(9, dtype="<u4").batch(0, 4, seed=1).dtype == np.dtype("<u4")
