"""Text of any dataset on the Hub: which files are read, at which commit, and what is refused."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat_core.config import ShardsConfig
from nanochat_core.data import shards
from nanochat_core.data.hub import client
from nanochat_core.data.shard_files import ShardSet, read_batches
from nanochat_core.data.text import text_files
from nanochat_core.errors import ConfigError, DataError
from nanochat_core.runtime.progress import read_events
from tests.support.nanochat_core.data.hub_server import HubServer

REPOSITORY = "someone/letters"


def parquet(column: str, texts: list[str]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"id": range(len(texts)), column: texts}), buffer)
    return buffer.getvalue()


def texts(kind: str, count: int = 200) -> list[str]:
    return [f"{kind} letter {i}: {'dear ' * (i % 7)}" for i in range(count)]


FILES = {
    "README.md": b"# Letters",
    "data/train-0.parquet": parquet("text", texts("first")),
    "data/train-1.parquet": parquet("text", texts("second")),
    "data/test-0.parquet": parquet("text", texts("test")),
    "more/lines.jsonl": "\n".join(json.dumps({"text": t}) for t in texts("line")).encode(),
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "WAITS", (0.0,))


def config(path: str | None = REPOSITORY, **options) -> ShardsConfig:
    values = {"revision": "main", **options}
    return ShardsConfig(source="hub", path=path, num_shards=2, snapshot=(), **values)


def made(job) -> list[str]:
    shards.run(job)
    found = ShardSet.open(job.output)
    paths = [*found.train, found.validation]
    return sorted(text for path in paths for group in read_batches(path) for text in group)


def test_of_several_kinds_the_first_is_read(hub: HubServer, make_job):
    """The others are most often the same text again."""
    hub.add(REPOSITORY, FILES)
    expected = sorted(text for kind in ("first", "second", "test") for text in texts(kind))
    assert made(make_job("shards", {}, shards=config())) == expected
    hub.add(REPOSITORY, {name: data for name, data in FILES.items() if "parquet" not in name})
    assert made(make_job("shards", {}, shards=config())) == sorted(texts("line"))


@pytest.mark.parametrize("path", ["more", "more/", "*/lines.jsonl"])
def test_a_folder_or_a_pattern_may_name_files_of_any_kind(hub: HubServer, make_job, path: str):
    hub.add(REPOSITORY, FILES)
    job = make_job("shards", {}, shards=config(f"datasets/{REPOSITORY}/{path}"))
    assert made(job) == sorted(texts("line"))


def test_a_hidden_folder_that_is_named_is_read(hub: HubServer, make_job):
    hub.add(REPOSITORY, {f".cache/{name}": data for name, data in FILES.items()})
    job = make_job("shards", {}, shards=config(f"{REPOSITORY}/.cache/data/train-*"))
    assert made(job) == sorted(texts("first") + texts("second"))


def test_a_dataset_that_has_more_of_other_data_names_the_pattern(hub: HubServer, make_job):
    hub.add(REPOSITORY, {**FILES, "data/all.csv": b"x" * 10**6})
    with pytest.raises(DataError, match="most bytes of someone/letters would be") as error:
        shards.run(make_job("shards", {}, shards=config()))
    pattern = f"{REPOSITORY}/*.parquet"
    assert pattern in str(error.value.hint)
    expected = sorted(text for kind in ("first", "second", "test") for text in texts(kind))
    assert made(make_job("shards", {}, shards=config(pattern))) == expected


def test_a_pattern_chooses_files(hub: HubServer, make_job):
    hub.add(REPOSITORY, FILES)
    job = make_job("shards", {}, shards=config(f"{REPOSITORY}/data/train-*"))
    assert made(job) == sorted(texts("first") + texts("second"))


def test_a_commit_gives_its_own_text_whatever_the_branch_has_since(hub: HubServer, make_job):
    commit = hub.add(REPOSITORY, {"a.jsonl": FILES["more/lines.jsonl"]})
    hub.add(REPOSITORY, {"a.parquet": FILES["data/test-0.parquet"]})
    assert made(make_job("shards", {}, shards=config(revision=commit))) == sorted(texts("line"))


def test_the_text_may_be_in_a_column_of_another_name(hub: HubServer, make_job):
    lines = "\n".join(json.dumps({"content": t}) for t in texts("line")).encode()
    hub.add(REPOSITORY, {"a.parquet": parquet("content", texts("row")), "b.jsonl": lines})
    job = make_job("shards", {}, shards=config(f"{REPOSITORY}/*", column="content"))
    assert made(job) == sorted(texts("row") + texts("line"))


def test_a_column_that_is_not_there_is_named_with_those_that_are(hub: HubServer, make_job):
    hub.add(REPOSITORY, {"a.parquet": parquet("content", texts("row"))})
    with pytest.raises(DataError, match="no column 'text', its columns are: id, content") as error:
        shards.run(make_job("shards", {}, shards=config()))
    assert "shards.column" in str(error.value.hint)


@pytest.mark.parametrize(
    ("files", "path", "says"),
    [
        ({"README.md": b"#"}, REPOSITORY, "no file to read"),
        (FILES, f"{REPOSITORY}/valid/*", "letters/valid/\\* has no file to read"),
        (FILES, "someone/else", "someone/else"),
    ],
)
def test_a_dataset_without_text_is_refused(hub: HubServer, make_job, files, path, says):
    hub.add(REPOSITORY, files)
    with pytest.raises(DataError, match=says):
        shards.run(make_job("shards", {}, shards=config(path)))


@pytest.mark.parametrize("path", [None, "", "letters", "/letters", "someone/", "some*/letters"])
def test_a_path_that_names_no_dataset_is_refused(make_job, path):
    with pytest.raises(ConfigError, match="names no dataset"):
        shards.run(make_job("shards", {}, shards=config(path)))


def test_a_revision_in_the_path_is_refused_with_the_setting_that_is_for_it(make_job):
    with pytest.raises(ConfigError, match="with a revision") as error:
        shards.run(make_job("shards", {}, shards=config("someone/letters@v1")))
    assert "--set shards.revision=v1" in str(error.value.hint)


def test_a_text_file_too_large_for_a_document_is_refused(
    hub: HubServer, make_job, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(text_files, "MAX_IN_TXT", 1000)
    hub.add(REPOSITORY, {"a.txt": b"x" * 1001})
    with pytest.raises(DataError, match=r"a\.txt has more than .* MB, and a \.txt is one document"):
        shards.run(make_job("shards", {}, shards=config()))


def test_a_person_learns_what_is_wrong_with_the_text(hub: HubServer, make_job):
    bad = ["\x00\x01binary\x02"] * 60 + ["the same"] * 200 + [" "] * 500
    hub.add(REPOSITORY, {"a.parquet": parquet("text", texts("row", 100) + bad)})
    assert warnings(make_job("shards", {}, shards=config())) == [
        "the text has only 5,105 characters",
        "258 of 360 documents are copies of an earlier one",
        "60 of 360 documents look like no text: they have control characters",
    ]


def test_a_good_text_gets_no_warning(hub: HubServer, make_job):
    good = [f"{text} {'and so on ' * 500}" for text in texts("row")]
    hub.add(REPOSITORY, {"a.parquet": parquet("text", good)})
    assert warnings(make_job("shards", {}, shards=config())) == []


def warnings(job) -> list[str]:
    shards.run(job)
    said = [event.get("text", "") for event in read_events(job.events)]
    return [text.removeprefix("warning: ") for text in said if text.startswith("warning: ")]
