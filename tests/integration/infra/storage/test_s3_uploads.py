"""Objects that are sent in parts are there in the end, or nothing is left of them."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from infra.parallel import THREADS
from infra.storage.s3.store import S3Store
from nanochat_core.errors import StoreError
from tests.support.infra.storage.fake_s3 import FakeS3
from tests.support.infra.storage.fixtures import IMPATIENT, PARTS, store_on
from tests.support.infra.storage.misbehaviour import Answer, Fault, Kind, Request
from tests.support.infra.storage.s3_server import start_s3


def test_an_upload_that_the_store_forgets_starts_over_however_late(
    fake: FakeS3, large: Path, small_parts: int
) -> None:
    store = store_on(fake, retry_policy=replace(IMPATIENT, deadline=0.0))
    parts = iter(range(1000))
    answer = fake.answer

    def forgetful(request: Request) -> Answer:
        if request.verb == "PUT partNumber" and next(parts) == 5:
            fake.uploads.clear()
        return answer(request)

    fake.answer = forgetful
    store.upload("large", large)
    assert fake.objects[f"{store.prefix}large"].data == large.read_bytes()
    assert fake.count("POST uploads") == 2


def test_an_upload_that_the_store_forgets_every_time_is_given_up_and_leaves_nothing(
    fake: FakeS3, large: Path, small_parts: int
) -> None:
    store = store_on(fake)
    fake.faults.append(
        Fault(kind=Kind.REFUSE, verb="PUT partNumber", status=404, code="NoSuchUpload")
    )
    with pytest.raises(StoreError, match="NoSuchUpload"):
        store.upload("large", large)
    assert fake.count("POST uploads") == 3
    assert fake.uploads == fake.objects == {}


def test_an_upload_that_fails_is_aborted(fake: FakeS3, large: Path, small_parts: int) -> None:
    store = store_on(fake)
    store.put("a", b"x")
    fake.faults.append(Fault(kind=Kind.REFUSE, verb="PUT partNumber", skip=3))
    with pytest.raises(StoreError, match="SlowDown"):
        store.upload("large", large)
    assert fake.uploads == {}
    assert fake.count("DELETE uploadId") == fake.count("POST uploads") > 0


@pytest.mark.parametrize("kind", [Kind.LOSE, Kind.REFUSE_AFTER])
def test_a_lost_answer_to_the_last_request_of_an_upload_is_no_failure(
    fake: FakeS3, large: Path, small_parts: int, kind: Kind
) -> None:
    store = store_on(fake)
    fake.faults.append(Fault(kind=kind, verb="POST uploadId", times=1))
    store.upload("large", large)
    assert fake.count("POST uploads") == 1
    assert fake.objects[f"{store.prefix}large"].data == large.read_bytes()


def test_a_server_that_dies_under_an_upload_and_comes_back_has_it_in_the_end(
    tmp_path: Path, large: Path, small_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_s3(tmp_path / "server")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    counts: list[int] = []

    def die(count: int) -> None:
        nonlocal server
        counts.append(count)
        if len(counts) == 4:
            server.kill()  # which forgets the upload
            server = start_s3(tmp_path / "server", server.port)

    try:
        server.make_bucket("nanochat")
        store = S3Store("s3://nanochat/x")
        store.put("a", b"acknowledged")
        store.upload("large", large, on_bytes=die)
        store.fetch("large", tmp_path / "target", size=large.stat().st_size)
        assert store.get("a") == b"acknowledged"
    finally:
        server.kill()
    assert (tmp_path / "target").read_bytes() == large.read_bytes()
    assert sum(counts) == large.stat().st_size


# Uploads; asks to be interrupted after some parts went.
INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from infra.storage.open import open_store
from tests.support.infra.storage.fixtures import set_part

url, path, part = sys.argv[1:]
set_part(setattr, int(part))
counts = []
def on_bytes(count):
    counts.append(count)
    if len(counts) == 4:
        os.kill(os.getpid(), signal.SIGINT)
try:
    open_store(url).upload("large", Path(path), on_bytes=on_bytes)
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_an_upload_that_is_interrupted_is_aborted_on_the_way_out(
    fake: FakeS3, large: Path, small_parts: int
) -> None:
    words = [sys.executable, "-c", INTERRUPTED, "s3://fake/x", str(large), str(small_parts)]
    assert subprocess.run(words, check=False, timeout=120).returncode == 7
    assert fake.uploads == fake.objects == {}
    assert fake.count("PUT partNumber") >= 4


def test_an_older_object_of_the_same_size_is_not_taken_for_the_upload(
    fake: FakeS3, large: Path, small_parts: int, tmp_path: Path
) -> None:
    store = store_on(fake)
    older = tmp_path / "older"
    older.write_bytes(os.urandom(large.stat().st_size))
    store.upload("large", older)
    fake.faults.append(Fault(kind=Kind.REFUSE, verb="POST uploadId", times=2))
    store.upload("large", large)
    assert fake.objects[f"{store.prefix}large"].data == large.read_bytes()


def test_an_object_that_comes_out_shorter_than_its_parts_is_an_error(
    fake: FakeS3, large: Path, small_parts: int
) -> None:
    store = store_on(fake)
    answer = fake.answer

    def losing(request: Request) -> Answer:
        if request.verb == "POST uploadId":
            fake.uploads[request.query["uploadId"]][2].pop(PARTS)
            request.body = request.body.replace(
                request.body[request.body.rindex(b"<Part>") : request.body.rindex(b"</Complete")],
                b"",
            )
        return answer(request)

    fake.answer = losing
    with pytest.raises(StoreError, match=r"does not show the \d+ bytes sent"):
        store.upload("large", large)


def begin(store: S3Store, key: str) -> str:
    """Begin an upload as a process that is then killed; return its id."""
    answer: dict[str, str] = store.request("create_multipart_upload", key)
    return answer["UploadId"]


def test_unfinished_uploads_are_dropped_by_the_stores_clock_and_only_our_own(fake: FakeS3) -> None:
    fake.now = lambda: time.time() - 50_000
    store = store_on(fake)
    old = begin(store, "old")
    store.put("_trials/old", b"")
    other = begin(store_on(fake), "old")
    fake.now = lambda: time.time() - 40_000
    new = begin(store, "new")
    assert store.abort_stale_uploads(older_than=20_000) == 0
    assert store.abort_stale_uploads(older_than=5_000) == 2
    assert set(fake.uploads) == {new, other}
    assert old not in fake.uploads
    assert list(store.list("")) == []


def test_several_transfers_share_the_threads(fake: FakeS3, large: Path, small_parts: int) -> None:
    store = store_on(fake)
    before = threading.active_count()
    uploads = [threading.Thread(target=store.upload, args=(f"large{n}", large)) for n in range(4)]
    for upload in uploads:
        upload.start()
    while any(upload.is_alive() for upload in uploads):
        ours = [t for t in threading.enumerate() if t.name.startswith("ThreadPoolExecutor")]
        # Five more submit transfers, one writes files.
        assert len(ours) <= THREADS + 6 + before
        time.sleep(0.01)
    assert len([key for key in fake.objects if "large" in key]) == 4
