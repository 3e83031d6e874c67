"""Stage `shards` from objects of a bucket, on a real server of this machine."""

import json
import uuid
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from nanochat_core.data import shards
from nanochat_core.data.hub.transfers import ByteProgress
from nanochat_core.data.text import s3_text
from nanochat_core.errors import ConfigError
from tests.support.nanochat_core.data.fixtures import parquet_bytes, refused, texts_of
from tests.support.nanochat_core.data.web_server import Answer, WebServer

DOCUMENTS = [f"document {i}: {'lorem ipsum ' * (i % 7)}\nend" for i in range(400)]


class Bucket:
    """A folder of a bucket that one test has to itself."""

    def __init__(self, server):
        server.make_bucket("texts")
        self.client, self.folder = server.client("s3"), uuid.uuid4().hex

    def put(self, name, content):
        self.client.put_object(Bucket="texts", Key=f"{self.folder}/{name}", Body=content)

    def job(self, shards_job, pattern=""):
        """Return a job of a run that is planned now."""
        path = f"texts/{self.folder}{pattern}"
        return shards_job("s3", path=path, snapshot=s3_text.s3_snapshot(path))

    def list(self, pattern=""):
        """Return the names of objects that are found, without the folder."""
        found = s3_text.list_objects(f"texts/{self.folder}{pattern}")
        return [item.path.removeprefix(f"texts/{self.folder}/") for item in found]


@pytest.fixture
def bucket(s3_server, monkeypatch):
    """Four hundred documents in objects of all three kinds, and one of another."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = Bucket(s3_server)
    lines = [json.dumps({"text": text, "id": 1}) for text in DOCUMENTS[:150]]
    bucket.put("a.jsonl", "\n".join(lines).encode())
    bucket.put("deep/b.parquet", parquet_bytes({"text": DOCUMENTS[150:399]}))
    bucket.put("c.txt", DOCUMENTS[399].encode())
    bucket.put("notes.pdf", b"\xff")
    return bucket


def test_every_document_below_a_prefix_is_read_once(bucket, shards_job):
    job = bucket.job(shards_job)
    assert shards.run(job)["documents"] == 400
    assert sorted(texts_of(job.output)) == sorted(DOCUMENTS)
    assert not (job.directory / "scratch").exists()


HIDDEN = (".cache/text/a.txt", ".cache/text/.git/b.txt", ".cache/text/.c.txt")


@pytest.mark.parametrize(
    ("names", "pattern", "found"),
    [
        (("train-1.txt", "test-1.txt"), "/train-*", ["train-1.txt"]),
        *(
            (HIDDEN, f"/{name}", [".cache/text/a.txt"])
            for name in (".cache/text", ".cache", ".cache/*", ".cache/text/a.txt")
        ),
        (HIDDEN, "", ["a.jsonl", "c.txt", "deep/b.parquet"]),
        *(
            (("run[1]/a?.txt",), f"/{name}", ["run[1]/a?.txt"])
            for name in ("run[1]", "run[1]/a?.txt", "run*")
        ),
    ],
)
def test_names_are_found_as_patterns_and_as_they_are_hidden_ones_where_named(
    bucket, names, pattern, found
):
    for name in names:
        bucket.put(name, b"one")
    assert bucket.list(pattern) == found


def test_an_attempt_downloads_only_the_objects_that_an_earlier_one_lacks(bucket, shards_job):
    bucket.put("d.jsonl", b"no json")
    job = bucket.job(shards_job)
    refused(rf"^s3://texts/{bucket.folder}/d\.jsonl:1 is not JSON", shards.run, job)
    scratch = job.directory / "scratch"
    (table,) = scratch.glob("*-b.parquet")
    others = {path: path.stat().st_ino for path in scratch.glob("*-?.*") if path != table}
    assert len(others) == 3
    table.unlink()
    refused(r"/d\.jsonl:1 is not JSON", shards.run, job)
    assert pq.read_table(table).num_rows == 249
    assert {path: path.stat().st_ino for path in others} == others


def test_an_object_written_between_plan_and_job_is_refused(bucket, shards_job):
    job = bucket.job(shards_job)
    bucket.put("c.txt", b"another text")
    refused("has changed since the run was planned", shards.run, job)


def test_an_object_written_during_the_download_is_refused(bucket, shards_job, monkeypatch):
    fetch = s3_text._download

    def fetch_and_write(*arguments):
        fetch(*arguments)
        bucket.put("c.txt", b"another text")

    monkeypatch.setattr(s3_text, "_download", fetch_and_write)
    refused("has changed since the run was planned", shards.run, bucket.job(shards_job))


@pytest.mark.parametrize("path", [None, "", "/text", "te*ts/x", "s3://texts/x", "texts//x"])
def test_a_path_without_a_bucket_is_refused(path):
    refused("names no bucket", s3_text.list_objects, path, kind=ConfigError)


def test_what_is_not_there_is_named(bucket):
    for path in ("", "/texts", "/texts/a.jsonl", "/*.jsonl"):
        missing = f"no-such-bucket-here{path}"
        refused("s3://no-such-bucket-here does not exist", s3_text.list_objects, missing)
    refused(r"s3://texts/nothing has no file to read", s3_text.list_objects, "texts/nothing")
    refused(r"pdf has no file to read", bucket.list, "/*.pdf")


def test_a_user_without_rights_is_refused_in_one_line(bucket, s3_server, monkeypatch):
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
