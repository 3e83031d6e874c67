import random

import pytest

from nanochat_core.config import TokenizerConfig
from nanochat_core.data.shard_files import ShardSet, shard_name, write_shard
from nanochat_core.errors import DataError
from nanochat_core.runtime.progress import last_by_step, read_events
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.train import tokenizer
from nanochat_core.train.tokenizer import limited_texts
from tests.support.small_job import small_job


def words(seed, documents):
    rng = random.Random(seed)
    names = ["".join(rng.choices("abcdefgh", k=5)) for _ in range(50)]
    return [" ".join(rng.choices(names, k=30)) for _ in range(documents)]


TRAIN = [words(1, 20), words(2, 20)]
VALIDATION = words(3, 5)


@pytest.fixture
def shards(tmp_path):
    directory = tmp_path / "shards"
    directory.mkdir()
    files = [
        write_shard(directory / shard_name(i), texts, scratch=tmp_path)
        for i, texts in enumerate([*TRAIN, VALIDATION])
    ]
    ShardSet(directory=directory, shards=tuple(files)).write()
    return directory


def make_job(tmp_path, shards, **changes):
    fields = {"vocab_size": 300, "max_chars": 10**6, "document_cap": 10**4}
    job = small_job(
        tmp_path / "job",
        stage="tokenizer",
        entry="nanochat_core.train.tokenizer",
        config={"tokenizer": TokenizerConfig(**{**fields, **changes}).tree()},
        inputs={"shards": shards},
    )
    job.output.mkdir(parents=True)
    return job


def test_the_tokenizer_is_learnt_from_the_training_shards_alone(tmp_path, shards):
    job = make_job(tmp_path, shards)
    metrics = tokenizer.run(job)
    expected = Tokenizer.train(iter([*TRAIN[0], *TRAIN[1]]), vocab_size=300)
    assert Tokenizer.load(job.output).digest() == expected.digest()
    num_tokens = sum(len(expected.encode(text)) for text in VALIDATION)
    assert metrics == {
        "vocab_size": 300,
        "bytes_per_token": pytest.approx(sum(map(len, VALIDATION)) / num_tokens),
    }
    (tmp_path / "again").mkdir()
    expected.save(tmp_path / "again")
    names = sorted(p.name for p in job.output.iterdir())
    assert names == ["tokenizer.json", "tokenizer.tiktoken"]
    for name in names:  # trained and written twice, to the byte
        assert (job.output / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_how_well_it_fits_is_reported_as_an_event(tmp_path, shards):
    job = make_job(tmp_path, shards)
    metrics = tokenizer.run(job)
    [scores] = last_by_step(read_events(job.events), "eval").values()
    assert scores["held-out"] == metrics["bytes_per_token"]
    assert {"python", "maths", "russian", "english/gpt2", "english/cl100k_base"} <= scores.keys()
    assert (
        scores["held-out"] > scores["english"] > 1
    )  # the words of the shards are not English ones


def test_reading_stops_at_its_limits(shards):
    train = ShardSet.open(shards).train
    capped = list(limited_texts(train, max_chars=10**6, document_cap=7))
    assert capped == [text[:7] for text in [*TRAIN[0], *TRAIN[1]]]
    some = list(limited_texts(train, max_chars=1000, document_cap=10**4))
    assert "".join(some) == "".join(TRAIN[0])[:1000]


def test_too_little_text_is_refused(tmp_path, shards):
    job = make_job(tmp_path, shards, vocab_size=300, max_chars=20)
    with pytest.raises(DataError, match="300 were asked for"):
        tokenizer.run(job)
    assert list(job.output.iterdir()) == []
