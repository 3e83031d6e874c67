"""Stage `shards` from objects of a bucket, on a real server of this machine."""

import io
import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat_core.config import ShardsConfig
from nanochat_core.data import shards
from nanochat_core.data.hub.transfers import ByteProgress
from nanochat_core.data.shard_files import ShardSet, read_batches
from nanochat_core.data.text import s3_text
from nanochat_core.errors import ConfigError, DataError
from tests.support.infra.storage.s3_server import S3Server
from tests.support.nanochat_core.data.fixtures import MakeJob

DOCUMENTS = [f"document {i}: {'lorem ipsum ' * (i % 7)}\nend" for i in range(400)]


class Bucket:
    """A folder of a bucket that one test has to itself."""

    def __init__(self, server: S3Server) -> None:
        server.make_bucket("texts")
        self.client, self.folder = server.client("s3"), uuid.uuid4().hex

    def put(self, name: str, content: bytes) -> None:
        """Write one object."""
        self.client.put_object(Bucket="texts", Key=f"{self.folder}/{name}", Body=content)

    def config(self, pattern: str = "", **changes: Any) -> ShardsConfig:
        """Return the settings of a run that is planned now."""
        path = f"texts/{self.folder}{pattern}"
        fields: dict[str, Any] = {"path": path, "num_shards": 3, "revision": None} | changes
        snapshot = s3_text.s3_snapshot(fields["path"])
        return ShardsConfig(source="s3", snapshot=snapshot, **fields)


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Four hundred documents in objects of all three kinds, and one of another."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = Bucket(s3_server)
    lines = [json.dumps({"text": text, "id": 1}) for text in DOCUMENTS[:150]]
    bucket.put("a.jsonl", "\n".join(lines).encode())
    table = io.BytesIO()
    pq.write_table(pa.table({"text": DOCUMENTS[150:399]}), table)
    bucket.put("deep/b.parquet", table.getvalue())
    bucket.put("c.txt", DOCUMENTS[399].encode())
    bucket.put("notes.pdf", b"\xff")
    return bucket


def texts_of(directory: Path) -> list[str]:
    made = ShardSet.open(directory)
    paths = (*made.train, made.validation)
    return [text for path in paths for group in read_batches(path) for text in group]


def test_every_document_below_a_prefix_is_read_once(bucket: Bucket, make_job: MakeJob) -> None:
    job = make_job("shards", {}, shards=bucket.config())
    assert shards.run(job)["documents"] == 400
    assert sorted(texts_of(job.output)) == sorted(DOCUMENTS)
    assert not (job.directory / "scratch").exists()


@pytest.mark.parametrize(
    ("pattern", "count"), [("/*.jsonl", 150), ("/deep", 249), ("/deep/b.parquet", 249)]
)
def test_a_pattern_a_folder_and_a_key_choose_objects(
    bucket: Bucket, make_job: MakeJob, pattern: str, count: int
) -> None:
    job = make_job("shards", {}, shards=bucket.config(pattern))
    assert shards.run(job)["documents"] == count


def test_a_pattern_within_a_name_lists_the_folder_before_it(bucket: Bucket) -> None:
    bucket.put("train-1.txt", b"one")
    bucket.put("test-1.txt", b"two")
    (found,) = s3_text.list_objects(f"texts/{bucket.folder}/train-*")
    assert found.path.endswith("/train-1.txt")


def test_a_prefix_that_is_hidden_is_read_and_what_is_hidden_below_is_not(bucket: Bucket) -> None:
    for name in (".cache/text/a.txt", ".cache/text/.git/b.txt", ".cache/text/.c.txt"):
        bucket.put(name, b"one")
    for name in (".cache/text", ".cache", ".cache/*", ".cache/text/a.txt"):
        (found,) = s3_text.list_objects(f"texts/{bucket.folder}/{name}")
        assert found.path.endswith("/.cache/text/a.txt")
    assert len(s3_text.list_objects(f"texts/{bucket.folder}")) == 3


def test_a_name_with_the_characters_of_a_pattern_is_found(bucket: Bucket) -> None:
    bucket.put("run[1]/a?.txt", b"one")
    for name in ("run[1]", "run[1]/a?.txt", "run*"):
        (found,) = s3_text.list_objects(f"texts/{bucket.folder}/{name}")
        assert found.path.endswith("/run[1]/a?.txt")


def test_an_attempt_downloads_only_the_objects_that_an_earlier_one_lacks(
    bucket: Bucket, make_job: MakeJob
) -> None:
    bucket.put("d.jsonl", b"no json")
    job = make_job("shards", {}, shards=bucket.config())
    with pytest.raises(DataError, match=rf"^s3://texts/{bucket.folder}/d\.jsonl:1 is not JSON"):
        shards.run(job)
    scratch = job.directory / "scratch"
    (table,) = scratch.glob("*-b.parquet")
    others = {path: path.stat().st_ino for path in scratch.glob("*-?.*") if path != table}
    assert len(others) == 3
    table.unlink()
    with pytest.raises(DataError, match=r"/d\.jsonl:1 is not JSON"):
        shards.run(job)
    assert pq.read_table(table).num_rows == 249
    assert {path: path.stat().st_ino for path in others} == others


def test_an_object_written_between_plan_and_job_is_refused(
    bucket: Bucket, make_job: MakeJob
) -> None:
    planned = bucket.config()
    bucket.put("c.txt", b"another text")
    job = make_job("shards", {}, shards=planned)
    with pytest.raises(DataError, match="has changed since the run was planned") as error:
        shards.run(job)
    assert "\n" not in str(error.value)
    assert list(job.output.iterdir()) == []


def test_an_object_written_during_the_download_is_refused(
    bucket: Bucket, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("shards", {}, shards=bucket.config())
    fetch = s3_text._download

    def fetch_and_write(*arguments: Any) -> None:
        fetch(*arguments)
        bucket.put("c.txt", b"another text")

    monkeypatch.setattr(s3_text, "_download", fetch_and_write)
    with pytest.raises(DataError, match="has changed since the run was planned"):
        shards.run(job)


@pytest.mark.parametrize("path", [None, "", "/text", "te*ts/x", "s3://texts/x", "texts//x"])
def test_a_path_without_a_bucket_is_refused(path: str | None) -> None:
    with pytest.raises(ConfigError, match="names no bucket"):
        s3_text.list_objects(path)


def test_what_is_not_there_is_named(bucket: Bucket) -> None:
    for path in ("", "/texts", "/texts/a.jsonl", "/*.jsonl"):
        with pytest.raises(DataError, match="s3://no-such-bucket-here does not exist"):
            s3_text.list_objects(f"no-such-bucket-here{path}")
    with pytest.raises(DataError, match=r"s3://texts/nothing has no file to read"):
        s3_text.list_objects("texts/nothing")
    with pytest.raises(DataError, match=r"pdf has no file to read"):
        s3_text.list_objects(f"texts/{bucket.folder}/*.pdf")


def test_a_user_without_rights_is_refused_in_one_line(
    bucket: Bucket, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.add_user("writer", allow=("s3:PutObject",)).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match=r"the S3 server refuses s3://texts/") as error:
        s3_text.list_objects(f"texts/{bucket.folder}")
    assert "AWS_ACCESS_KEY_ID" in (error.value.hint or "")


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client not wait before its next attempt."""
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda seconds: None))


@pytest.mark.usefixtures("no_pauses")
def test_a_server_that_drops_packets_gets_three_times_five_seconds(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def connect(address: object, timeout: float, *_: object, **__: object) -> None:
        waited.append(timeout)
        raise TimeoutError

    monkeypatch.setattr("urllib3.util.connection.create_connection", connect)
    with pytest.raises(DataError, match=r"cannot be read: Connect timeout on endpoint URL"):
        s3_text.s3_snapshot(f"texts/{bucket.folder}")
    assert waited == [5, 5, 5]


class _Cutting(BaseHTTPRequestHandler):
    """Say that an object has a hundred bytes, and send ten."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "100")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(b"0123456789")

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_body_that_is_cut_off_each_time_is_one_line(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    item = s3_text.S3Object(path="texts/a.txt", size=100, changed=1)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Cutting) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.server_port}")
        try:
            with pytest.raises(DataError, match=r"^s3://texts cannot be read: ") as error:
                s3_text._download(
                    {tmp_path / "a.txt": item}, "s3://texts", ByteProgress(100, print)
                )
        finally:
            server.shutdown()
    assert "Max Retries" not in str(error.value)
    assert "\n" not in str(error.value)
    assert "the network" in (error.value.hint or "")


@pytest.mark.usefixtures("no_pauses")
def test_a_server_that_does_not_answer_is_one_line(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"s3://texts/\w+ cannot be read: ") as error:
        s3_text.list_objects(f"texts/{bucket.folder}")
    assert "\n" not in str(error.value)
    assert "AWS_ENDPOINT_URL" in (error.value.hint or "")
