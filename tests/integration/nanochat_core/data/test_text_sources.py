"""Text of any dataset on the Hub and of any bucket: which files are read, and what is refused."""

import json
import uuid
from types import SimpleNamespace

import pytest

from nanochat_core.data import shards
from nanochat_core.data.hub import errors
from nanochat_core.data.hub.transfers import ByteProgress
from nanochat_core.data.text import s3_text
from nanochat_core.errors import ConfigError
from tests.support.nanochat_core.data.fixtures import parquet_bytes, refused, texts_of
from tests.support.nanochat_core.data.web_server import Answer, WebServer

REPOSITORY = "someone/letters"


def parquet(texts):
    return parquet_bytes({"id": range(len(texts)), "text": texts})


def texts(kind, count=200):
    return [f"{kind} letter {i}: {'dear ' * (i % 7)}" for i in range(count)]


FILES = {
    "README.md": b"# Letters",
    "data/train-0.parquet": parquet(texts("first")),
    "data/train-1.parquet": parquet(texts("second")),
    "data/test-0.parquet": parquet(texts("test")),
    "more/lines.jsonl": "\n".join(json.dumps({"text": text}) for text in texts("line")).encode(),
    "more/note.txt": b"a note",
}


class Repository:
    """A dataset on the Hub."""

    path = REPOSITORY

    def __init__(self, hub, shards_job):
        self.hub, self.shards_job = hub, shards_job

    def put(self, files):
        return self.hub.add(self.path, files)

    def job(self, pattern="", **settings):
        """Return a job of a run that is planned now."""
        given = {"path": f"{self.path}{pattern}", "num_shards": 2, "revision": "main"} | settings
        return self.shards_job("hub", **given)


class Bucket:
    """A folder of a bucket that one test has to itself."""

    def __init__(self, server, shards_job):
        server.make_bucket("texts")
        self.client, self.shards_job = server.client("s3"), shards_job
        self.path = f"texts/{uuid.uuid4().hex}"

    def put(self, files):
        for name, data in files.items():
            key = f"{self.path}/{name}".removeprefix("texts/")
            self.client.put_object(Bucket="texts", Key=key, Body=data)

    def job(self, pattern="", **settings):
        """Return a job of a run that is planned now."""
        path = f"{self.path}{pattern}"
        return self.shards_job("s3", path=path, snapshot=s3_text.s3_snapshot(path), **settings)

    def list(self, pattern=""):
        """Return the names of objects that are found, without the folder."""
        found = s3_text.list_objects(f"{self.path}{pattern}")
        return [item.path.removeprefix(f"{self.path}/") for item in found]


@pytest.fixture
def repository(hub, shards_job, monkeypatch):
    monkeypatch.setattr(errors, "WAITS", (0.0,))
    return Repository(hub, shards_job)


@pytest.fixture
def bucket(s3_server, shards_job, monkeypatch):
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return Bucket(s3_server, shards_job)


@pytest.fixture(params=["repository", "bucket"])
def source(request):
    return request.getfixturevalue(request.param)


def made(job):
    shards.run(job)
    assert not (job.directory / "scratch").exists()
    return sorted(texts_of(job.output))


def of(*kinds):
    return sorted(text for kind in kinds for text in texts(kind))


@pytest.mark.parametrize(
    ("pattern", "kinds"),
    [
        ("/data/train-*", ("first", "second")),
        ("/*.parquet", ("first", "second", "test")),
        ("/more/lines.jsonl", ("line",)),
        ("/*/l*.jsonl", ("line",)),
        ("/.cache/data/train-*", ("first", "second")),
    ],
)
def test_a_path_chooses_files_and_hidden_ones_where_named(source, pattern, kinds):
    source.put(FILES | {f".cache/{name}": data for name, data in FILES.items()})
    assert made(source.job(pattern)) == of(*kinds)


def test_a_folder_is_read_whole_and_of_a_dataset_the_first_kind_that_it_has(bucket, repository):
    for source in (bucket, repository):
        source.put(FILES)
        assert made(source.job("/more/")) == sorted(["a note", *texts("line")])
        kinds = ("first", "second", "test")
        # Files of other kinds are most often the same text again.
        rest = [] if source is repository else ["a note", *texts("line")]
        assert made(source.job()) == sorted([*of(*kinds), *rest])
    repository.put({name: data for name, data in FILES.items() if "parquet" not in name})
    assert made(repository.job(path=f"datasets/{REPOSITORY}")) == of("line")


def test_a_path_without_text_is_refused_and_the_rest_too_if_it_is_most_of_it(source):
    source.put({**FILES, "data/all.csv": b"x" * 10**6})
    for pattern, complaint, hint in (
        ("/valid/*", f"{source.path}/valid/\\* has no file to read", ""),
        ("", f"most bytes of .*{source.path} would be left out", "a pattern in shards.path"),
    ):
        refused(complaint, lambda path: shards.run(source.job(path)), pattern, hint=hint)


NO_PATHS = {
    "hub": (None, "", "letters", "/letters", "someone/", "some*/letters", f"{REPOSITORY}@v1"),
    "s3": (None, "", "/text", "te*ts/x", "s3://texts/x", "texts//x"),
}


@pytest.mark.parametrize(("source", "path"), [(s, path) for s in NO_PATHS for path in NO_PATHS[s]])
def test_a_path_without_a_dataset_or_bucket_is_refused(shards_job, source, path):
    job = shards_job(source, path=path, revision="main")
    hint = "--set shards.revision=v1" if path == f"{REPOSITORY}@v1" else "give "
    complaint = "with a revision|names no (dataset|bucket)"
    refused(complaint, shards.run, job, kind=ConfigError, hint=hint)


def test_a_commit_gives_its_own_text_whatever_the_branch_has_since(repository):
    commit = repository.put({"a.jsonl": FILES["more/lines.jsonl"]})
    repository.put({"a.parquet": FILES["data/test-0.parquet"]})
    assert made(repository.job(revision=commit)) == of("line")
    missing = repository.job(path="someone/else")
    refused("there is no dataset someone/else", shards.run, missing, leaves=True)


# A bucket has no commits: a plan records what it holds.


@pytest.mark.parametrize("when", ["before", "during"])
def test_an_object_written_since_the_plan_or_during_the_download_is_refused(
    bucket, monkeypatch, when
):
    fetch = s3_text._download

    def fetch_and_write(*arguments):
        fetch(*arguments)
        bucket.put({"more/note.txt": b"another text"})

    bucket.put(FILES)
    job = bucket.job()
    if when == "before":
        bucket.put({"more/note.txt": b"another text"})
    else:
        monkeypatch.setattr(s3_text, "_download", fetch_and_write)
    refused("has changed since the run was planned", shards.run, job)


def test_a_name_that_looks_like_a_pattern_is_found_as_it_is(bucket):
    bucket.put({"run[1]/a?.txt": b"one", ".cache/.git/a.txt": b"hidden in what is named"})
    for pattern in ("/run[1]", "/run[1]/a?.txt", "/run*"):
        assert bucket.list(pattern) == ["run[1]/a?.txt"]
    refused("has no file to read", bucket.list, "/.cache")


def test_an_attempt_downloads_only_the_objects_that_an_earlier_one_lacks(bucket):
    bucket.put({**FILES, "d.jsonl": b"no json"})
    job = bucket.job()
    refused(rf"^s3://{bucket.path}/d\.jsonl:1 is not JSON", shards.run, job)
    table, *others = sorted((job.directory / "scratch").glob("*-*.*"))
    assert len(others) == 5
    before = {path: path.stat().st_ino for path in others}
    table.unlink()
    refused(r"/d\.jsonl:1 is not JSON", shards.run, job)
    assert table.exists()
    assert {path: path.stat().st_ino for path in others} == before


def test_a_bucket_that_does_not_exist_or_may_not_be_read_is_named(bucket, s3_server, monkeypatch):
    for path in ("", "/texts", "/texts/a.jsonl", "/*.jsonl"):
        missing = f"no-such-bucket-here{path}"
        refused("s3://no-such-bucket-here does not exist", s3_text.list_objects, missing)
    for name, value in s3_server.add_user("writer", allow=("s3:PutObject",)).items():
        monkeypatch.setenv(name, value)
    refused(r"the S3 server refuses s3://texts/", bucket.list, hint="AWS_ACCESS_KEY_ID")


def test_a_server_that_drops_packets_gets_three_times_five_seconds(bucket, monkeypatch):
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda seconds: None))
    waited = []

    def connect(address, timeout, *_, **__):
        waited.append(timeout)
        raise TimeoutError

    monkeypatch.setattr("urllib3.util.connection.create_connection", connect)
    timeout = r"s3://texts/\w+ cannot be read: Connect timeout on endpoint URL"
    refused(timeout, bucket.list, hint="AWS_ENDPOINT_URL")
    assert waited == [5, 5, 5]


def test_a_body_that_is_cut_off_each_time_is_one_line(bucket, monkeypatch, tmp_path):
    wanted = {tmp_path / "a.txt": s3_text.S3Object(path="texts/a.txt", size=100, changed=1)}
    with WebServer(bytes(100)) as web:
        web.answers = [Answer(after=10)] * 99
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", web.url.removesuffix("/bundle.zip"))
        given = (wanted, "s3://texts", ByteProgress(100, print))
        match = r"^s3://texts cannot be read: "
        line = refused(match, s3_text._download, *given, hint="the network")
    assert "Max Retries" not in line
