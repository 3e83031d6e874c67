"""Stage `shards` from the Hub: growth, resuming, what is kept and what is refused, by source."""

import hashlib
import io
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from nanochat_core.config import ShardsConfig
from nanochat_core.data import shards
from nanochat_core.data.hub import client as hub_module
from nanochat_core.data.hub import shards as hub_shards
from nanochat_core.data.hub.shards import HubDataset
from nanochat_core.data.shard_files import Origin, ShardSet, read_batches, shard_name
from nanochat_core.data.text.text_folder import folder_snapshot
from nanochat_core.errors import ConfigError, DataError
from nanochat_core.runtime.progress import read_events
from tests.support.nanochat_core.data.hub_server import HubServer

NUM_SHARDS = 8
SOURCES = ("climbmix", "fineweb-edu")
REPOSITORIES = {name: dataset.repository for name, dataset in hub_shards.DATASETS.items()}


def parquet(texts, **options) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), buffer, **options)
    return buffer.getvalue()


def texts_of(number: int) -> list[str]:
    return [f"shard {number}, document {i}: {'lorem ' * (i % 5)}" for i in range(50)]


FILES = {shard_name(n): parquet(texts_of(n), row_group_size=20) for n in range(NUM_SHARDS)}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets of eight shards, and little patience."""
    datasets = {
        name: HubDataset(repository=REPOSITORIES[name], num_shards=NUM_SHARDS) for name in SOURCES
    }
    monkeypatch.setattr(hub_shards, "DATASETS", datasets)
    monkeypatch.setattr(shards, "DATASETS", datasets)
    monkeypatch.setattr(hub_module, "WAITS", (0.0,))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> str:
    return request.param


def config(source: str, num_shards: int = 2, revision: str | None = "main") -> ShardsConfig:
    return ShardsConfig(
        source=source, path=None, num_shards=num_shards, snapshot=(), revision=revision
    )


def documents_of(path: Path) -> list[str]:
    return [text for group in read_batches(path) for text in group]


def digests(directory: Path) -> dict[str, str]:
    files = directory.glob("*.parquet")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def names(hub: HubServer) -> list[str]:
    """Shards whose bytes were sent, each time they were."""
    return sorted(request.file for request in hub.downloads())


def test_the_last_shard_of_the_dataset_is_for_validation(hub: HubServer, make_job, source):
    commit = hub.add(REPOSITORIES[source], {"README.md": b"hello", **FILES})
    job = make_job("shards", {}, shards=config(source))
    metrics = shards.run(job)
    made = ShardSet.open(job.output)
    assert [documents_of(path) for path in made.train] == [texts_of(0), texts_of(1)]
    assert documents_of(made.validation) == texts_of(7)
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
    assert not (job.directory / "scratch").exists()


def test_progress_counts_shards_and_bytes(hub: HubServer, make_job):
    hub.add(REPOSITORIES["climbmix"], FILES)
    job = make_job("shards", {}, shards=config("climbmix"))
    shards.run(job)
    events = list(read_events(job.events))
    assert [event["kind"] for event in events] == ["message", "start", "step", "step", "step"]
    assert "3 shards, 0 MB" in events[0]["text"]
    assert events[1]["unit"] == "shard"
    size = sum(len(FILES[shard_name(n)]) for n in (0, 1, 7))
    assert (events[-1]["step"], events[-1]["values"]) == (3, {"bytes": size})


def test_more_shards_cost_only_the_new_ones(hub: HubServer, make_job, tmp_path):
    hub.add(REPOSITORIES["climbmix"], FILES)
    first = make_job("shards", {}, shards=config("climbmix", 2))
    shards.run(first)
    (tmp_path / "shards-job").rename(tmp_path / "earlier")
    before = len(hub.requests)
    job = make_job("shards", {}, shards=config("climbmix", 5))
    shards.run(job)
    assert [request.file for request in hub.requests[before:] if request.kind == "bytes"]
    assert names(hub) == [shard_name(n) for n in (0, 1, 2, 3, 4, 7)]
    made = ShardSet.open(job.output)
    assert [documents_of(path) for path in made.train] == [texts_of(n) for n in range(5)]
    assert documents_of(made.validation) == texts_of(7)


def test_a_job_that_resumes_downloads_only_what_is_missing(hub: HubServer, make_job):
    hub.add(REPOSITORIES["climbmix"], FILES)
    job = make_job("shards", {}, shards=config("climbmix", 4))
    hub.fail(shard_name(3), 403)
    with pytest.raises(DataError, match="answers 403 for 5 files of karpathy/climbmix"):
        shards.run(job)
    assert not (job.output / "shards.json").exists()
    before = {request.file for request in hub.downloads() if request.status == 200}
    first = len(hub.requests)
    shards.run(job)
    again = {request.file for request in hub.requests[first:] if request.kind == "bytes"}
    assert shard_name(3) in again
    assert not again & before
    assert digests(job.output) == {
        shard_name(place): hashlib.sha256(FILES[shard_name(n)]).hexdigest()
        for place, n in enumerate((0, 1, 2, 3, 7))
    }


def test_a_shard_that_lies_damaged_in_the_output_is_replaced(hub: HubServer, make_job):
    hub.add(REPOSITORIES["climbmix"], FILES)
    job = make_job("shards", {}, shards=config("climbmix"))
    shards.run(job)
    whole = digests(job.output)
    for name, data in ((shard_name(0), b"half"), (shard_name(1), FILES[shard_name(2)])):
        (job.output / name).unlink()  # it may be the very file in the cache
        (job.output / name).write_bytes(data)
    shards.run(job)
    assert digests(job.output) == whole
    assert len(hub.downloads()) == 3


def test_an_output_takes_no_space_beside_the_cache(hub: HubServer, make_job, monkeypatch):
    hub.add(REPOSITORIES["climbmix"], FILES)
    job = make_job("shards", {}, shards=config("climbmix"))
    shards.run(job)
    assert {path.stat().st_nlink for path in job.output.glob("*.parquet")} == {2}

    def refuse(*paths: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    for path in job.output.glob("*.parquet"):
        path.unlink()
    shards.run(job)
    assert {path.stat().st_nlink for path in job.output.glob("*.parquet")} == {1}
    assert len(digests(job.output)) == 3


def test_a_branch_that_moved_between_two_attempts_never_mixes(hub: HubServer, make_job):
    hub.add(REPOSITORIES["climbmix"], FILES)
    job = make_job("shards", {}, shards=config("climbmix", 3))
    hub.fail(shard_name(2), 403)
    with pytest.raises(DataError):
        shards.run(job)
    other = {name: parquet([f"new {name}"]) for name in FILES}
    commit = hub.add(REPOSITORIES["climbmix"], other)
    assert shards.run(job)["commit"] == commit
    made = ShardSet.open(job.output)
    texts = [documents_of(path) for path in (*made.train, made.validation)]
    assert texts == [[f"new {shard_name(n)}"] for n in (0, 1, 2, 7)]


def test_a_commit_is_always_the_same_text(hub: HubServer, make_job):
    first = hub.add(REPOSITORIES["climbmix"], FILES)
    hub.add(REPOSITORIES["climbmix"], {name: parquet([name]) for name in FILES})
    job = make_job("shards", {}, shards=config("climbmix", revision=first))
    assert shards.run(job)["commit"] == first
    assert documents_of(ShardSet.open(job.output).train[0]) == texts_of(0)


def test_blank_documents_are_left_out(hub: HubServer, make_job, source):
    blank = [None, "", " \n", *texts_of(0)]
    hub.add(REPOSITORIES[source], {**FILES, shard_name(0): parquet(blank, row_group_size=2)})
    job = make_job("shards", {}, shards=config(source))
    metrics = shards.run(job)
    assert (metrics["documents"], metrics["blank_documents"]) == (150, 3)
    first = digests(job.output)
    assert documents_of(ShardSet.open(job.output).train[0]) == texts_of(0)
    assert shards.run(job)["blank_documents"] == 3
    assert digests(job.output) == first
    assert len(hub.downloads()) == 3


def not_utf8() -> bytes:
    data = [*(text.encode() for text in texts_of(0)), b"\xc3("]
    return parquet(pa.array(data, pa.binary()).view(pa.string()), row_group_size=25)


BAD = {
    "empty": (parquet(pa.array([], pa.string())), r"{file} is empty"),
    "blank": (parquet([None, "", " "]), r"{file} has 3 documents, all of them blank"),
    "no text": (FILES["shard_00000.parquet"].replace(b"text", b"txet"), r"{file} has no column"),
    "numbers": (parquet([1, 2]), r"{file} has a column 'text' of int64"),
    "not UTF-8": (not_utf8(), r"{file} is not UTF-8 in row 50 \(row group 2\): invalid"),
    "cut short": (FILES["shard_00000.parquet"][:-100], r"{file} cannot be read as parquet"),
    "nothing": (b"", r"{file} cannot be read as parquet"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_shard_on_the_hub_that_cannot_be_used_is_named(hub: HubServer, make_job, source, kind):
    data, complaint = BAD[kind]
    hub.add(REPOSITORIES[source], {**FILES, shard_name(1): data})
    job = make_job("shards", {}, shards=config(source))
    with pytest.raises(DataError, match=complaint.format(file=r"shard_00001\.parquet")) as error:
        shards.run(job)
    assert error.value.hint
    assert not (job.output / shard_name(1)).exists()
    assert not (job.output / "shards.json").exists()


@pytest.mark.parametrize("kind", [kind for kind in BAD if kind not in ("blank", "empty")])
def test_a_local_parquet_file_that_cannot_be_used_is_named(make_job, tmp_path, kind):
    data, complaint = BAD[kind]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.parquet").write_bytes(FILES["shard_00000.parquet"])
    (tmp_path / "text" / "b.parquet").write_bytes(data)
    local = ShardsConfig(
        source="local",
        path=str(tmp_path / "text"),
        num_shards=2,
        snapshot=folder_snapshot(tmp_path / "text"),
        revision=None,
    )
    job = make_job("shards", {}, shards=local)
    with pytest.raises(DataError, match=complaint.format(file=r"b\.parquet")) as error:
        shards.run(job)
    assert error.value.hint
    assert list(job.output.iterdir()) == []


def test_a_shard_that_stays_damaged_on_the_way_is_named(hub: HubServer, make_job):
    hub.add(REPOSITORIES["climbmix"], FILES)
    hub.spoil(shard_name(1), times=None)
    job = make_job("shards", {}, shards=config("climbmix"))
    with pytest.raises(DataError, match=r"shard_00001\.parquet of karpathy/climbmix.* wrong twice"):
        shards.run(job)
    assert not (job.output / shard_name(1)).exists()


@pytest.mark.parametrize("number", [0, 4, 7])
def test_fewer_shards_than_the_dataset_is_known_to_have_are_refused(
    hub: HubServer, make_job, source, number
):
    hub.add(REPOSITORIES[source], {n: d for n, d in FILES.items() if n != shard_name(number)})
    job = make_job("shards", {}, shards=config(source))
    with pytest.raises(DataError, match=r"has 7 shards at commit .*, 8 are expected") as error:
        shards.run(job)
    assert "shards.revision" in (error.value.hint or "")
    assert hub.downloads() == []


def test_a_shard_of_another_name_is_no_replacement(hub: HubServer, make_job):
    files = {n: d for n, d in FILES.items() if n != shard_name(1)}
    hub.add(REPOSITORIES["climbmix"], {**files, "shard_1.parquet": FILES[shard_name(1)]})
    job = make_job("shards", {}, shards=config("climbmix"))
    with pytest.raises(DataError, match=r"has no file shard_00001\.parquet at commit"):
        shards.run(job)
    assert hub.downloads() == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_shards": 8}, "shards.num_shards is 8, karpathy/.* has 7 for training"),
        ({"num_shards": 900}, "shards.num_shards is 900, karpathy/.* has 7 for training"),
        ({"revision": None}, "shards.revision is missing for karpathy/"),
    ],
)
def test_a_config_that_asks_for_too_much_is_refused(
    hub: HubServer, make_job, source, changes, complaint
):
    with pytest.raises(ConfigError, match=complaint):
        shards.run(make_job("shards", {}, shards=config(source, **changes)))
    assert hub.requests == []


def test_offline_the_cache_is_enough_and_nothing_else(hub: HubServer, make_job, monkeypatch):
    hub.add(REPOSITORIES["climbmix"], FILES)
    job = make_job("shards", {}, shards=config("climbmix"))
    shards.run(job)
    whole = digests(job.output)
    for path in job.output.iterdir():
        path.unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(hub.requests)
    shards.run(job)
    assert digests(job.output) == whole
    with pytest.raises(DataError, match=r"6 files of karpathy.* is not on this mach"):
        shards.run(make_job("shards", {}, shards=config("climbmix", 5)))
    assert len(hub.requests) == before
