"""Stage `shards` from the Hub: growth, what is kept, what is replaced and what is refused."""

import os

import pytest
from huggingface_hub import constants

from nanochat_core.data import shards
from nanochat_core.data.hub import errors
from nanochat_core.data.hub import shards as hub_shards
from nanochat_core.data.hub.shards import HubDataset
from nanochat_core.data.shard_files import Origin, ShardSet, shard_name
from nanochat_core.errors import DataError
from nanochat_core.runtime.progress import read_events
from tests.support.nanochat_core.data.fixtures import documents_of, parquet_bytes, refused

NUM_SHARDS = 8
REPOSITORY = "karpathy/climbmix-400b-shuffle"


def parquet(texts, **options):
    return parquet_bytes({"text": texts}, **options)


def texts_of(number):
    return [f"shard {number}, document {i}: {'lorem ' * (i % 5)}" for i in range(50)]


FILES = {shard_name(n): parquet(texts_of(n), row_group_size=20) for n in range(NUM_SHARDS)}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A dataset of eight shards, and little patience."""
    dataset = HubDataset(repository=REPOSITORY, num_shards=NUM_SHARDS)
    monkeypatch.setitem(hub_shards.DATASETS, "climbmix", dataset)
    monkeypatch.setattr(errors, "WAITS", (0.0,))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)


@pytest.fixture
def job(shards_job):
    """job(number of shards): a job that reads the dataset."""
    return lambda num_shards=2: shards_job("climbmix", num_shards=num_shards, revision="main")


def parquet_of(job):
    return [path.read_bytes() for path in sorted(job.output.glob("*.parquet"))]


def documents_in(job):
    """Documents of each shard, that of validation last."""
    made = ShardSet.open(job.output)
    return [documents_of(path) for path in (*made.train, made.validation)]


def names(hub):
    """Shards whose bytes were sent, each time they were."""
    return sorted(request.file for request in hub.downloads())


def test_the_last_shard_is_for_validation_and_more_shards_cost_only_the_new_ones(hub, job):
    commit = hub.add(REPOSITORY, {"README.md": b"hello", **FILES})
    stage = job()
    metrics = shards.run(stage)
    made = ShardSet.open(stage.output)
    assert documents_in(stage) == [texts_of(0), texts_of(1), texts_of(7)]
    assert made.validation.read_bytes() == FILES["shard_00007.parquet"]
    assert made.origin == Origin(repository=REPOSITORY, revision="main", commit=commit)
    assert metrics == {
        "documents": 150,
        "characters": sum(len(text) for n in (0, 1, 7) for text in texts_of(n)),
        "validation_documents": 50,
        "validation_characters": sum(map(len, texts_of(7))),
        "blank_documents": 0,
        "commit": commit,
    }
    events = list(read_events(stage.events))
    assert [event["kind"] for event in events] == ["message", "start", "step", "step", "step"]
    assert "3 shards, 0 MB" in events[0]["text"]
    size = sum(len(FILES[shard_name(n)]) for n in (0, 1, 7))
    assert (events[-1]["step"], events[-1]["values"]) == (3, {"bytes": size})
    assert names(hub) == [shard_name(n) for n in (0, 1, 7)]
    assert not (stage.directory / "scratch").exists()
    more = job(5)
    shards.run(more)
    assert documents_in(more) == [texts_of(n) for n in (0, 1, 2, 3, 4, 7)]
    assert names(hub) == [shard_name(n) for n in (0, 1, 2, 3, 4, 7)]


def test_a_shard_that_lies_damaged_in_the_output_is_replaced(hub, job):
    hub.add(REPOSITORY, FILES)
    stage = job()
    shards.run(stage)
    whole = parquet_of(stage)
    for name, data in ((shard_name(0), b"half"), (shard_name(1), FILES[shard_name(2)])):
        (stage.output / name).unlink()  # it may be the very file in the cache
        (stage.output / name).write_bytes(data)
    shards.run(stage)
    assert parquet_of(stage) == whole
    assert len(hub.downloads()) == 3


def test_an_output_takes_no_space_beside_the_cache(hub, job, monkeypatch):
    hub.add(REPOSITORY, FILES)
    stage = job()

    def refuse(*paths):
        raise OSError(18, "Invalid cross-device link")

    for link, links in ((os.link, 2), (refuse, 1)):
        monkeypatch.setattr(os, "link", link)
        shards.run(stage)
        found = list(stage.output.glob("*.parquet"))
        assert [path.stat().st_nlink for path in found] == [links] * 3


def test_a_branch_that_moved_between_two_attempts_never_mixes(hub, job):
    hub.add(REPOSITORY, FILES)
    stage = job(3)
    hub.fail(shard_name(2), 403)
    with pytest.raises(DataError):
        shards.run(stage)
    assert not (stage.output / "shards.json").exists()
    commit = hub.add(REPOSITORY, {name: parquet([f"new {name}"]) for name in FILES})
    assert shards.run(stage)["commit"] == commit
    assert documents_in(stage) == [[f"new {shard_name(n)}"] for n in (0, 1, 2, 7)]


def test_blank_documents_are_left_out(hub, job):
    blank = [None, "", " \n", *texts_of(0)]
    hub.add(REPOSITORY, {**FILES, shard_name(0): parquet(blank, row_group_size=2)})
    stage = job()
    metrics = shards.run(stage)
    assert (metrics["documents"], metrics["blank_documents"]) == (150, 3)
    first = parquet_of(stage)
    assert documents_in(stage)[0] == texts_of(0)
    shards.run(stage)
    assert parquet_of(stage) == first


def without(*numbers):
    return {name: data for name, data in FILES.items() if name not in map(shard_name, numbers)}


# Files of the dataset, and what is said of them; the readers' own tests know more kinds of damage.
REFUSED = [
    ({**FILES, shard_name(1): parquet([None, " "])}, r"shard_00001\.parquet has 2 .* all of them"),
    *((without(n), "at commit .*: it has 7 shards, 8 are expected") for n in (0, 7)),
    ({**without(1), "shard_1.parquet": b""}, r"has no file shard_00001\.parquet at commit"),
]


@pytest.mark.parametrize(("files", "complaint"), REFUSED)
def test_a_dataset_whose_shards_cannot_be_used_is_refused(hub, job, files, complaint):
    hub.add(REPOSITORY, files)
    stage = job()
    refused(complaint, shards.run, stage, hint="", leaves=True)
    assert not (stage.output / shard_name(1)).exists()
    assert not (stage.output / "shards.json").exists()
    lacks_one = FILES.keys() - files.keys()
    assert not (lacks_one and hub.downloads())
