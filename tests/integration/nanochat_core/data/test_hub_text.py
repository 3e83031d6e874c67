"""Text of any dataset on the Hub: which files are read, at which commit, and what is refused."""

import json

import pytest

from nanochat_core.data import shards
from nanochat_core.data.hub import errors
from nanochat_core.data.text import text_files
from nanochat_core.errors import ConfigError
from nanochat_core.runtime.progress import read_events
from tests.support.nanochat_core.data.fixtures import parquet_bytes, refused, texts_of

REPOSITORY = "someone/letters"


def parquet(column, texts):
    return parquet_bytes({"id": range(len(texts)), column: texts})


def texts(kind, count=200):
    return [f"{kind} letter {i}: {'dear ' * (i % 7)}" for i in range(count)]


FILES = {
    "README.md": b"# Letters",
    "data/train-0.parquet": parquet("text", texts("first")),
    "data/train-1.parquet": parquet("text", texts("second")),
    "data/test-0.parquet": parquet("text", texts("test")),
    "more/lines.jsonl": "\n".join(json.dumps({"text": t}) for t in texts("line")).encode(),
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(errors, "WAITS", (0.0,))


@pytest.fixture
def job(shards_job):
    """job(path, **settings): a job that reads a dataset, at what its branch has today."""

    def make(path=REPOSITORY, **settings):
        return shards_job("hub", **{"path": path, "num_shards": 2, "revision": "main"} | settings)

    return make


def made(job):
    shards.run(job)
    return sorted(texts_of(job.output))


def of(*kinds):
    return sorted(text for kind in kinds for text in texts(kind))


@pytest.mark.parametrize(
    ("path", "kinds"),
    [
        # Of several kinds of files the first is read: others are most often the same text again.
        (REPOSITORY, ("first", "second", "test")),
        (f"{REPOSITORY}/data/train-*", ("first", "second")),
        (f"{REPOSITORY}/*.parquet", ("first", "second", "test")),
        (f"{REPOSITORY}/.cache/data/train-*", ("first", "second")),
        *((f"datasets/{REPOSITORY}/{name}", ("line",)) for name in ("more", "more/", "*/l*.jsonl")),
    ],
)
def test_a_path_chooses_files_and_hidden_ones_where_named(hub, job, path, kinds):
    hub.add(REPOSITORY, FILES | {f".cache/{name}": data for name, data in FILES.items()})
    assert made(job(path)) == of(*kinds)


def test_without_files_of_the_first_kind_those_of_the_next_are_read(hub, job):
    hub.add(REPOSITORY, {name: data for name, data in FILES.items() if "parquet" not in name})
    assert made(job()) == of("line")


def test_a_commit_gives_its_own_text_whatever_the_branch_has_since(hub, job):
    commit = hub.add(REPOSITORY, {"a.jsonl": FILES["more/lines.jsonl"]})
    hub.add(REPOSITORY, {"a.parquet": FILES["data/test-0.parquet"]})
    assert made(job(revision=commit)) == of("line")


def test_the_text_may_be_in_a_column_of_another_name(hub, job):
    lines = "\n".join(json.dumps({"content": t}) for t in texts("line")).encode()
    hub.add(REPOSITORY, {"a.parquet": parquet("content", texts("row")), "b.jsonl": lines})
    assert made(job(f"{REPOSITORY}/*", column="content")) == of("row", "line")


@pytest.mark.parametrize(
    ("files", "path", "complaint", "hint"),
    [
        ({"README.md": b"#"}, REPOSITORY, "no file to read", None),
        (FILES, f"{REPOSITORY}/valid/*", "letters/valid/\\* has no file to read", None),
        (FILES, "someone/else", "someone/else", None),
        (
            {**FILES, "data/all.csv": b"x" * 10**6},
            *(REPOSITORY, f"most bytes of {REPOSITORY} would be", "a pattern in shards.path"),
        ),
        (
            {"a.parquet": parquet("content", texts("row"))},
            *(REPOSITORY, "no column 'text', its columns are: id, content", "shards.column"),
        ),
        ({"a.txt": b"x" * 9001}, REPOSITORY, r"a\.txt has more than .*, and a \.txt is one", None),
    ],
)
def test_what_cannot_be_read_is_refused(hub, job, monkeypatch, files, path, complaint, hint):
    monkeypatch.setattr(text_files, "MAX_IN_TXT", 9000)
    hub.add(REPOSITORY, files)
    refused(complaint, shards.run, job(path), hint=hint)


@pytest.mark.parametrize("path", [None, "", "letters", "/letters", "someone/", "some*/letters"])
def test_a_path_that_names_no_dataset_is_refused(job, path):
    refused("names no dataset", shards.run, job(path), kind=ConfigError)


def test_a_revision_in_the_path_is_refused_with_the_setting_that_is_for_it(job):
    hint = "--set shards.revision=v1"
    refused("with a revision", shards.run, job(f"{REPOSITORY}@v1"), kind=ConfigError, hint=hint)


def test_the_log_warns_of_what_is_wrong_with_the_text(hub, job):
    bad = ["\x00\x01binary\x02"] * 60 + ["the same"] * 200 + [" "] * 500
    hub.add(REPOSITORY, {"a.parquet": parquet("text", texts("row", 100) + bad)})
    assert warnings(job()) == [
        "the text has only 5,105 characters",
        "258 of 360 documents are copies of an earlier one",
        "60 of 360 documents look like no text: they have control characters",
    ]


def test_a_good_text_gets_no_warning(hub, job):
    good = [f"{text} {'and so on ' * 500}" for text in texts("row")]
    hub.add(REPOSITORY, {"a.parquet": parquet("text", good)})
    assert warnings(job()) == []


def warnings(job):
    shards.run(job)
    said = [event.get("text", "") for event in read_events(job.events)]
    return [text.removeprefix("warning: ") for text in said if text.startswith("warning: ")]
