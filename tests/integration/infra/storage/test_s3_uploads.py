"""Objects that are sent in parts are there in the end, or nothing is left of them."""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest

from infra.parallel import THREADS
from infra.storage.s3.store import S3Store
from nanochat_core.errors import StoreError
from tests.support.flows.waiting import wait_until
from tests.support.infra.storage.fixtures import IMPATIENT, PARTS, Rig
from tests.support.infra.storage.misbehaviour import Answer, Fault, Kind, Request


@pytest.mark.parametrize("verb", ["PUT partNumber", "POST uploadId"])
def test_an_upload_that_the_store_forgets_starts_over_however_late(rig: Rig, verb: str) -> None:
    """An older object of the same size is not taken for it."""
    rig.store = rig.new_store(replace(IMPATIENT, deadline=0.0))
    older = rig.directory / "older"
    older.write_bytes(os.urandom(rig.large.stat().st_size))
    rig.store.upload("large", older)
    rig.requests.clear()

    def forget(request: Request, answer: Callable[[Request], Answer]) -> Answer:
        if request.verb == verb and rig.count("POST uploads") == 1:
            rig.uploads.clear()
        return answer(request)

    rig.intercept(forget)
    rig.store.upload("large", rig.large)
    assert rig.data("large") == rig.large.read_bytes()
    assert rig.count("POST uploads") == 2


@pytest.mark.parametrize(
    ("status", "code", "skip", "rounds"), [(404, "NoSuchUpload", 0, 3), (503, "SlowDown", 3, 1)]
)
def test_an_upload_that_fails_is_given_up_and_leaves_nothing(
    rig: Rig, status: int, code: str, skip: int, rounds: int
) -> None:
    rig.store.put("a", b"x")
    rig.misbehave(
        Fault(kind=Kind.REFUSE, verb="PUT partNumber", status=status, code=code, skip=skip)
    )
    with pytest.raises(StoreError, match=code):
        rig.store.upload("large", rig.large)
    assert rig.count("POST uploads") == rig.count("DELETE uploadId") == rounds
    assert rig.uploads == {}
    assert len(rig.objects) == 1


@pytest.mark.parametrize("kind", [Kind.LOSE, Kind.REFUSE_AFTER])
def test_a_lost_answer_to_the_last_request_of_an_upload_is_no_failure(rig: Rig, kind: Kind) -> None:
    rig.misbehave(Fault(kind=kind, verb="POST uploadId", times=1))
    rig.store.upload("large", rig.large)
    assert rig.count("POST uploads") == 1
    assert rig.data("large") == rig.large.read_bytes()


def test_an_upload_that_is_interrupted_is_aborted_on_the_way_out(rig: Rig) -> None:
    number = count()

    def interrupt(request: Request, answer: Callable[[Request], Answer]) -> Answer:
        if request.verb == "PUT partNumber" and next(number) == 3:
            time.sleep(0.2)  # until the caller waits for the transfer
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.5)  # the upload must not end before this process notices
        return answer(request)

    rig.intercept(interrupt)
    with pytest.raises(KeyboardInterrupt):
        rig.store.upload("large", rig.large)
    wait_until(lambda: rig.uploads == {})  # once the parts that are on their way have arrived
    assert rig.objects == {}


def test_an_object_that_comes_out_shorter_than_its_parts_is_an_error(rig: Rig) -> None:
    def lose_a_part(request: Request, answer: Callable[[Request], Answer]) -> Answer:
        if request.verb == "POST uploadId":
            rig.uploads[request.query["uploadId"]].parts.pop(PARTS)
            last = request.body[request.body.rindex(b"<Part>") : request.body.rindex(b"</Complete")]
            request.body = request.body.replace(last, b"")
        return answer(request)

    rig.intercept(lose_a_part)
    with pytest.raises(StoreError, match=r"does not show the \d+ bytes sent"):
        rig.store.upload("large", rig.large)


def begin(store: S3Store, key: str) -> str:
    """Begin an upload as a process that is then killed; return its id."""
    answer: dict[str, str] = store.request("create_multipart_upload", key)
    return answer["UploadId"]


def test_unfinished_uploads_are_dropped_by_the_stores_clock_and_only_our_own(rig: Rig) -> None:
    rig.now = lambda: time.time() - 50_000
    begin(rig.store, "old")
    rig.store.put("_trials/old", b"")
    other = begin(rig.new_store(), "old")
    rig.now = lambda: time.time() - 40_000
    new = begin(rig.store, "new")
    assert rig.store.abort_stale_uploads(before=time.time() - 60_000) == 0
    assert rig.store.abort_stale_uploads(before=time.time() - 45_000) == 2
    assert set(rig.uploads) == {new, other}
    assert list(rig.store.list("")) == []
    rig.refuse("GET uploads", 403, "AccessDenied")
    with pytest.raises(StoreError, match="AccessDenied"):
        rig.store.abort_stale_uploads(before=0.0)


def test_several_transfers_share_the_threads(rig: Rig) -> None:
    before = threading.active_count()
    uploads = [
        threading.Thread(target=rig.store.upload, args=(f"large{n}", rig.large)) for n in range(4)
    ]
    for upload in uploads:
        upload.start()
    while any(upload.is_alive() for upload in uploads):
        ours = [t for t in threading.enumerate() if t.name.startswith("ThreadPoolExecutor")]
        # Five more submit transfers, one writes files.
        assert len(ours) <= THREADS + 6 + before
        time.sleep(0.01)
    assert len([key for key in rig.objects if "large" in key]) == 4
