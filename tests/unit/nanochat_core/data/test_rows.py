import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_core.config import RowsConfig
from nanochat_core.data import rows
from nanochat_core.data.row_files import BLOCK_ROWS, Rows, permutation
from nanochat_core.data.token_files import TokenSet, TokenShard
from nanochat_core.runtime.progress import Progress
from tests.support.nanochat_core.data.fixtures import refused


def config(**changes):
    fields = {"policy": "default", "sequence_len": 32, "buffer_documents": 50}
    return RowsConfig(**{**fields, **changes})


def numbered(num_rows, *, dtype="<u2"):
    """Rows of which all ids are their number."""
    ids = np.repeat(np.arange(num_rows, dtype=dtype)[:, None], 4, axis=1)
    return Rows(ids=ids, vocab_size=2**16, tokenizer="")


@pytest.mark.parametrize("policy", ["default", "nanochat"])
def test_rows_are_the_documents_in_pieces(make_job, tokens_dir, policy):
    job = make_job("rows", {"tokens": tokens_dir}, rows=config(policy=policy))
    metrics = rows.run(job)
    tokens = TokenSet.open(tokens_dir)
    tree = json.loads((job.output / "rows.json").read_text())
    assert tree["tokens"] == sum(shard.tokens for shard in tokens.shards[:-1])
    assert tree["tokenizer"] == tokens.tokenizer
    assert 0 <= tree["waste"] == metrics["waste"] < (0.1 if policy == "default" else 0.5)
    # Of the places of all rows, those that are no document's token are the added bos.
    num_rows = metrics["num_train"]
    added = num_rows * 33 - round(tree["tokens"] * (1 - tree["waste"]))
    assert 0 <= added <= num_rows
    assert sorted(p.name for p in job.output.iterdir()) == ["rows.json", "train.rows", "val.rows"]
    for split, shards in (("train", tokens.shards[:2]), ("val", tokens.shards[2:])):
        made = Rows.open(job.output, split)
        assert made.num_rows == metrics[f"num_{split}"] > 0
        assert (made.sequence_len, made.vocab_size) == (32, 300)
        taken = made.take(np.arange(made.num_rows))
        assert taken.dtype == np.int64
        assert (taken[:, 0] == tokens.bos).all()
        text = ",".join(str(i) for s in shards for i in tokens.read_tokens(s).tolist())
        for row in taken.tolist():  # every piece between two bos is somewhere in the text
            ids = ",".join("|" if i == tokens.bos else str(i) for i in row)
            assert all(piece.strip(",") in text for piece in ids.split("|"))


def test_a_document_that_is_longer_than_a_row_continues_in_the_next(tmp_path):
    np.arange(100, dtype="<u2").tofile(tmp_path / "a.tokens")  # 0 is bos
    np.save(tmp_path / "a.lengths.npy", np.array([100], dtype=np.uint32))
    shard = TokenShard(name="a", documents=1, tokens=100, row_groups=(1,))
    tokens = TokenSet(
        directory=tmp_path, dtype="uint16", vocab_size=100, bos=0, tokenizer="", shards=(shard,)
    )
    progress = Progress(tmp_path / "events.jsonl")
    rows.write_rows(tmp_path / "made", tokens, [shard], config=config(), progress=progress)
    made = np.fromfile(tmp_path / "made", dtype="<u2").reshape(-1, 33)
    assert made[:, 0].tolist() == [0, 0, 0]
    assert made[:, 1:].ravel().tolist() == list(range(1, 97))


def test_too_little_text_for_a_row_is_refused(make_job, tokens_dir):
    job = make_job("rows", {"tokens": tokens_dir}, rows=config(sequence_len=100_000))
    refused(r"\d+ tokens for train fill no row of 100001", rows.run, job)


def test_files_that_are_no_rows_are_refused(make_job, tokens_dir, tmp_path):
    refused("holds no rows", Rows.open, tmp_path, "train")
    job = make_job("rows", {"tokens": tokens_dir}, rows=config())
    rows.run(job)
    path = job.output / "train.rows"
    path.write_bytes(path.read_bytes()[:-2])
    complaint = r"train\.rows has \d+ bytes, \d+ are expected"
    refused(complaint, Rows.open, job.output, "train", hint="")
    (job.output / "rows.json").write_text('{"format": 0}')
    refused("is not of format", Rows.open, job.output, "val")


@pytest.mark.parametrize("num_rows", [1, 5, 1023, 1024, 1025, 3 * 1024 + 7])
def test_an_epoch_is_every_row_once_and_the_next_in_another_order(num_rows):
    made = numbered(num_rows)
    first, second = (made.step_ids(epoch, num_rows, 42) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(num_rows))
    if num_rows > 5:
        assert first.tolist() != second.tolist()
        assert first.tolist() != made.step_ids(0, num_rows, 43).tolist()


@pytest.mark.parametrize("rows_per_step", [1, 7, 64, 1000, 4000])
def test_the_order_does_not_depend_on_how_steps_cut_it(rows_per_step):
    made = numbered(1500)
    total = rows_per_step * -(-6000 // rows_per_step)
    steps = [made.step_ids(s, rows_per_step, 42) for s in range(total // rows_per_step)]
    assert np.array_equal(np.concatenate(steps)[:6000], made.step_ids(0, 6000, 42))
    assert all(len(step) == rows_per_step and step.dtype == np.int64 for step in steps)


def test_neighbours_in_the_order_are_near_in_the_file():
    made = numbered(8 * BLOCK_ROWS)
    ids = made.step_ids(3, BLOCK_ROWS, 42)
    assert len(set((ids // BLOCK_ROWS).tolist())) == 1
    assert ids.tolist() != sorted(ids.tolist())
    assert made.take(ids)[:, 0].tolist() == ids.tolist()
    order, following = np.split(
        made.step_ids(0, 16 * BLOCK_ROWS, 42)[::BLOCK_ROWS] // BLOCK_ROWS, 2
    )
    assert sorted(order) == sorted(following) == list(range(8))
    assert (order != following).any()


def test_the_order_of_training_stays_what_it_was():
    assert permutation(8, 1).tolist() == [4, 3, 7, 0, 1, 5, 6, 2]
    assert numbered(3000).step_ids(2, 4, 42).tolist() == [2266, 2548, 2726, 2891]


@settings(deadline=None)
@given(st.integers(1, 2500), st.integers(1, 300), st.integers(0, 50), st.sampled_from((1, 2, 4, 8)))
def test_ranks_share_the_rows_of_a_step_at_any_world_size(num_rows, rows_per_step, step, world):
    rows = numbered(num_rows)
    ids = rows.step_ids(step, rows_per_step, 7)
    assert len(ids) == rows_per_step
    for rank in range(world):
        share = rows.batch(step, rows_per_step, seed=7, rank=rank, world=world)
        assert share[:, 0].tolist() == ids[rank::world].tolist()


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_a_batch_has_the_type_of_the_file(dtype):
    assert numbered(9, dtype=dtype).batch(0, 4, seed=1).dtype == np.dtype(dtype)
