import json

import numpy as np
import pytest

from nanochat_core.data import tokens as tokenize
from nanochat_core.data.shard_files import ROW_GROUP_DOCUMENTS, shard_name
from nanochat_core.data.token_files import TokenSet, dtype_for
from nanochat_core.tokenizer.bpe import Tokenizer
from tests.support.nanochat_core.data.fixtures import refused

SHARDS = [
    [f"word{i} is word{i * 3}" for i in range(ROW_GROUP_DOCUMENTS + 10)],
    ["thing", "", "<|bos|> typed", "\u00e9t\u00e9 \U0001f600"],
    ["validation"],
]


@pytest.fixture
def job(make_job, write_shards, tokenizer_dir):
    return make_job("tokens", {"shards": write_shards(SHARDS), "tokenizer": tokenizer_dir})


def test_the_output_is_the_tokens_of_the_documents_and_nothing_else(job, tokenizer_dir):
    metrics = tokenize.run(job)
    tokenizer = Tokenizer.load(tokenizer_dir)
    tokens = TokenSet.open(job.output)
    assert (tokens.dtype, tokens.vocab_size, tokens.bos) == ("uint16", 300, tokenizer.bos)
    assert tokens.tokenizer == tokenizer.digest()
    for shard, documents in zip(tokens.shards, SHARDS, strict=True):
        ids, lengths = tokens.read_tokens(shard), tokens.read_lengths(shard)
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        assert all(part[0] == tokenizer.bos for part in parts)
        assert [tokenizer.decode(part[1:].tolist()) for part in parts] == documents
        assert not any((part[1:] >= tokenizer.bos).any() for part in parts)
    assert tokens.shards[0].row_groups == (ROW_GROUP_DOCUMENTS, 10)
    assert metrics["tokens"] == sum(shard.tokens for shard in tokens.shards)
    assert metrics["validation_tokens"] == tokens.shards[-1].tokens
    assert metrics["documents"] == sum(map(len, SHARDS))
    names = [f"shard_{i:05d}" for i in range(3)]
    expected = [f"{n}.{kind}" for n in names for kind in ("lengths.npy", "tokens")]
    assert sorted(p.name for p in job.output.iterdir()) == [*expected, "tokens.json"]
    assert not (job.directory / "scratch").exists()


def test_a_shard_that_is_done_is_not_done_again(job):
    tokenize.run(job)
    whole = {p.name: p.read_bytes() for p in job.output.iterdir()}
    # What a kill leaves: one shard done, one without its lengths, half a file in scratch.
    done = (job.output / "shard_00000.tokens").stat()
    (job.output / "shard_00001.lengths.npy").unlink()
    (job.output / "tokens.json").unlink()
    (job.directory / "scratch").mkdir()
    (job.directory / "scratch" / "shard_00001").write_bytes(b"half")
    tokenize.run(job)
    assert (job.output / "shard_00000.tokens").stat().st_mtime_ns == done.st_mtime_ns
    assert {p.name: p.read_bytes() for p in job.output.iterdir()} == whole


def test_large_vocabularies_take_four_bytes(tmp_path, write_shards, tokenizer_dir):
    assert (dtype_for(2**16), dtype_for(2**16 + 1)) == ("uint16", "uint32")
    path = write_shards(SHARDS) / shard_name(1)
    given = {"tokenizer_directory": tokenizer_dir, "output": tmp_path, "scratch": tmp_path}
    shard = tokenize.tokenize_shard(path, dtype="uint32", **given)
    assert (tmp_path / "shard_00001.tokens").stat().st_size == 4 * shard.tokens


def test_tokens_that_are_damaged_or_absent_are_refused(job, tmp_path):
    refused("holds no tokens", TokenSet.open, tmp_path)
    tokenize.run(job)
    tokens = TokenSet.open(job.output)
    path = job.output / "shard_00000.tokens"
    path.write_bytes(path.read_bytes()[:-2])
    refused(
        r"shard_00000\.tokens has \d+ bytes, \d+ are expected", tokens.read_tokens, tokens.shards[0]
    )
    (job.output / "shard_00001.lengths.npy").write_bytes(b"")
    refused(r"shard_00001\.lengths\.npy does not fit", tokens.read_lengths, tokens.shards[1])
    tree = json.loads((job.output / "tokens.json").read_text())
    (job.output / "tokens.json").write_text(json.dumps({**tree, "format": 0}))
    refused("is not of format", TokenSet.open, job.output)
