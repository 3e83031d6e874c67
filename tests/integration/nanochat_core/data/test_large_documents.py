"""Documents of ten megabytes are documents."""

import json

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat_core.data import shards
from nanochat_core.data import tokens as tokenize
from nanochat_core.data.shard_files import shard_name
from nanochat_core.data.token_files import TokenSet
from nanochat_core.tokenizer.bpe import Tokenizer
from tests.support.nanochat_core.data.fixtures import texts_of

HUGE = "\u4e2d" * 3_500_000  # three bytes each


def test_huge_documents_and_null_are_tokenized(make_job, write_shards, tokenizer_dir):
    directory = write_shards([["replaced"], ["held out"]])
    table = pa.table({"text": [None, HUGE, "", "word1"]})
    pq.write_table(table, directory / shard_name(0))
    job = make_job("tokens", {"shards": directory, "tokenizer": tokenizer_dir})
    tokenize.run(job)
    tokens = TokenSet.open(job.output)
    lengths = tokens.read_lengths(tokens.shards[0]).tolist()
    assert (lengths[0], lengths[2]) == (1, 1)  # nothing but the token that begins a document
    ids = tokens.read_tokens(tokens.shards[0])[2 : 1 + lengths[1]]
    assert Tokenizer.load(tokenizer_dir).decode(ids.tolist()) == HUGE


def test_huge_documents_pass_whole_from_files_of_every_kind(shards_job, tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    few = [f"document {i}" for i in range(100)]
    (folder / "few.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in few))
    (folder / "long.jsonl").write_text(json.dumps({"text": HUGE}))
    (folder / "long.txt").write_text(HUGE + "!", encoding="utf-8")
    pq.write_table(pa.table({"text": [HUGE + "?"]}), folder / "long.parquet")
    job = shards_job(path=folder)
    assert shards.run(job)["documents"] == 103
    assert set(texts_of(job.output)) == {HUGE, HUGE + "!", HUGE + "?", *few}
