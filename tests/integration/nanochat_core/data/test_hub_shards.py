"""Stage `shards` from the Hub: growth, resuming, what is kept and what is refused, by source."""

import os

import pytest
from huggingface_hub import constants

from nanochat_core.data import shards
from nanochat_core.data.hub import errors
from nanochat_core.data.hub import shards as hub_shards
from nanochat_core.data.hub.shards import HubDataset
from nanochat_core.data.shard_files import Origin, ShardSet, shard_name
from nanochat_core.errors import ConfigError, DataError
from nanochat_core.runtime.progress import read_events
from tests.support.nanochat_core.data.fixtures import documents_of, parquet_bytes, refused

NUM_SHARDS = 8
SOURCES = ("climbmix", "fineweb-edu")
REPOSITORIES = {name: dataset.repository for name, dataset in hub_shards.DATASETS.items()}


def parquet(texts, **options):
    return parquet_bytes({"text": texts}, **options)


def texts_of(number):
    return [f"shard {number}, document {i}: {'lorem ' * (i % 5)}" for i in range(50)]


FILES = {shard_name(n): parquet(texts_of(n), row_group_size=20) for n in range(NUM_SHARDS)}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Datasets of eight shards, and little patience."""
    datasets = {
        name: HubDataset(repository=REPOSITORIES[name], num_shards=NUM_SHARDS) for name in SOURCES
    }
    monkeypatch.setattr(hub_shards, "DATASETS", datasets)
    monkeypatch.setattr(shards, "DATASETS", datasets)
    monkeypatch.setattr(errors, "WAITS", (0.0,))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)


@pytest.fixture(params=SOURCES)
def source(request):
    return request.param


@pytest.fixture
def job(shards_job):
    """job(source, number of shards, revision): a job that reads a dataset."""
    return lambda source="climbmix", num_shards=2, revision="main": shards_job(
        source, num_shards=num_shards, revision=revision
    )


def parquet_of(job):
    return [path.read_bytes() for path in sorted(job.output.glob("*.parquet"))]


def documents_in(job):
    """Documents of each shard, that of validation last."""
    made = ShardSet.open(job.output)
    return [documents_of(path) for path in (*made.train, made.validation)]


def names(hub):
    """Shards whose bytes were sent, each time they were."""
    return sorted(request.file for request in hub.downloads())


def test_the_last_shard_of_the_dataset_is_for_validation(hub, job, source):
    commit = hub.add(REPOSITORIES[source], {"README.md": b"hello", **FILES})
    stage = job(source)
    metrics = shards.run(stage)
    made = ShardSet.open(stage.output)
    assert documents_in(stage) == [texts_of(0), texts_of(1), texts_of(7)]
    assert made.validation.read_bytes() == FILES["shard_00007.parquet"]
    assert made.origin == Origin(repository=REPOSITORIES[source], revision="main", commit=commit)
    assert metrics == {
        "documents": 150,
        "characters": sum(len(text) for n in (0, 1, 7) for text in texts_of(n)),
        "validation_documents": 50,
        "validation_characters": sum(map(len, texts_of(7))),
        "blank_documents": 0,
        "commit": commit,
    }
    assert names(hub) == [shard_name(0), shard_name(1), shard_name(7)]
    assert not (stage.directory / "scratch").exists()


def test_progress_counts_shards_and_bytes(hub, job):
    hub.add(REPOSITORIES["climbmix"], FILES)
    stage = job()
    shards.run(stage)
    events = list(read_events(stage.events))
    assert [event["kind"] for event in events] == ["message", "start", "step", "step", "step"]
    assert "3 shards, 0 MB" in events[0]["text"]
    assert events[1]["unit"] == "shard"
    size = sum(len(FILES[shard_name(n)]) for n in (0, 1, 7))
    assert (events[-1]["step"], events[-1]["values"]) == (3, {"bytes": size})


def test_more_shards_cost_only_the_new_ones(hub, job, tmp_path):
    hub.add(REPOSITORIES["climbmix"], FILES)
    first = job("climbmix", 2)
    shards.run(first)
    (tmp_path / "shards-job").rename(tmp_path / "earlier")
    before = len(hub.requests)
    stage = job("climbmix", 5)
    shards.run(stage)
    assert [request.file for request in hub.requests[before:] if request.kind == "bytes"]
    assert names(hub) == [shard_name(n) for n in (0, 1, 2, 3, 4, 7)]
    assert documents_in(stage) == [texts_of(n) for n in (0, 1, 2, 3, 4, 7)]


def test_a_job_that_resumes_downloads_only_what_is_missing(hub, job):
    hub.add(REPOSITORIES["climbmix"], FILES)
    stage = job("climbmix", 4)
    hub.fail(shard_name(3), 403)
    refused("answers 403 for 5 files of karpathy/climbmix", shards.run, stage, leaves=True)
    assert not (stage.output / "shards.json").exists()
    before = {request.file for request in hub.downloads() if request.status == 200}
    first = len(hub.requests)
    shards.run(stage)
    again = {request.file for request in hub.requests[first:] if request.kind == "bytes"}
    assert shard_name(3) in again
    assert not again & before
    assert parquet_of(stage) == [FILES[shard_name(n)] for n in (0, 1, 2, 3, 7)]


def test_a_shard_that_lies_damaged_in_the_output_is_replaced(hub, job):
    hub.add(REPOSITORIES["climbmix"], FILES)
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
    hub.add(REPOSITORIES["climbmix"], FILES)
    stage = job()
    shards.run(stage)
    assert {path.stat().st_nlink for path in stage.output.glob("*.parquet")} == {2}

    def refuse(*paths):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    for path in stage.output.glob("*.parquet"):
        path.unlink()
    shards.run(stage)
    assert {path.stat().st_nlink for path in stage.output.glob("*.parquet")} == {1}
    assert len(parquet_of(stage)) == 3


def test_a_branch_that_moved_between_two_attempts_never_mixes(hub, job):
    hub.add(REPOSITORIES["climbmix"], FILES)
    stage = job("climbmix", 3)
    hub.fail(shard_name(2), 403)
    with pytest.raises(DataError):
        shards.run(stage)
    other = {name: parquet([f"new {name}"]) for name in FILES}
    commit = hub.add(REPOSITORIES["climbmix"], other)
    assert shards.run(stage)["commit"] == commit
    assert documents_in(stage) == [[f"new {shard_name(n)}"] for n in (0, 1, 2, 7)]


def test_blank_documents_are_left_out(hub, job, source):
    blank = [None, "", " \n", *texts_of(0)]
    hub.add(REPOSITORIES[source], {**FILES, shard_name(0): parquet(blank, row_group_size=2)})
    stage = job(source)
    metrics = shards.run(stage)
    assert (metrics["documents"], metrics["blank_documents"]) == (150, 3)
    first = parquet_of(stage)
    assert documents_in(stage)[0] == texts_of(0)
    assert shards.run(stage)["blank_documents"] == 3
    assert parquet_of(stage) == first
    assert len(hub.downloads()) == 3


# The readers' own tests know more kinds of damage.
BAD = {
    "blank": (parquet([None, "", " "]), r"{file} has 3 documents, all of them blank"),
    "cut short": (FILES["shard_00000.parquet"][:-100], r"{file} cannot be read as parquet"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_shard_on_the_hub_that_cannot_be_used_is_named(hub, job, source, kind):
    data, complaint = BAD[kind]
    hub.add(REPOSITORIES[source], {**FILES, shard_name(1): data})
    stage = job(source)
    complaint = complaint.format(file=r"shard_00001\.parquet")
    refused(complaint, shards.run, stage, hint="", leaves=True)
    assert not (stage.output / shard_name(1)).exists()
    assert not (stage.output / "shards.json").exists()


@pytest.mark.parametrize("number", [0, 7])
def test_a_shard_that_the_dataset_lacks_is_refused(hub, job, source, number):
    hub.add(REPOSITORIES[source], {n: d for n, d in FILES.items() if n != shard_name(number)})
    stage = job(source)
    complaint = r"at commit .*: it has 7 shards, 8 are expected"
    refused(complaint, shards.run, stage, hint="shards.revision")
    assert hub.downloads() == []


def test_a_shard_of_another_name_is_no_replacement(hub, job):
    files = {n: d for n, d in FILES.items() if n != shard_name(1)}
    hub.add(REPOSITORIES["climbmix"], {**files, "shard_1.parquet": FILES[shard_name(1)]})
    refused(r"has no file shard_00001\.parquet at commit", shards.run, job())
    assert hub.downloads() == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_shards": 8}, "shards.num_shards is 8, karpathy/.* has 7 for training"),
        ({"num_shards": 900}, "shards.num_shards is 900, karpathy/.* has 7 for training"),
        ({"revision": None}, "shards.revision is missing for karpathy/"),
    ],
)
def test_a_config_that_asks_for_too_much_is_refused(hub, job, source, changes, complaint):
    refused(complaint, shards.run, job(source, **changes), kind=ConfigError)
    assert hub.requests == []
