"""What answers in a store's place, or in front of it: login pages, redirects, proxies."""

import gc
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.retry import RetryPolicy
from infra.storage.base import ObjectNotFound, StoreUnavailable
from infra.storage.s3.store import S3Store
from nanochat_core.errors import StoreError
from tests.support.infra.storage.fake_s3 import FakeS3
from tests.support.infra.storage.fixtures import store_on
from tests.support.infra.storage.misbehaviour import PAGE, Answer, Fault, Kind, Request

VERBS: dict[str, Callable[[S3Store, Path], object]] = {
    "list": lambda store, path: list(store.list("")),
    "get": lambda store, path: store.get("a"),
    "head": lambda store, path: store.head("a"),
    "put": lambda store, path: store.put("a", b"x"),
    "upload": lambda store, path: store.upload("large", path),
    "stored": lambda store, path: store.get_stored("a"),
    "absent": lambda store, path: store.put_if_absent("c", b"x"),
    "delete": lambda store, path: store.delete("a"),
    "fetch": lambda store, path: store.fetch("a", path.with_name("target"), size=9),
    "uploads": lambda store, path: store.list_unfinished(),
}


SEVERAL = ("list", "get", "head", "put", "upload", "fetch", "uploads")


@pytest.mark.parametrize(
    ("verb", "status"),
    [(verb, status) for verb in SEVERAL for status in (200, 302)]
    + [("get", status) for status in (301, 307, 308)],
)
def test_a_web_page_is_one_line_after_few_requests_whatever_was_asked(
    fake: FakeS3, large: Path, verb: str, status: int
) -> None:
    headers = {"Location": "http://portal.invalid/login"} if status != 200 else {}
    fake.faults.append(Fault(kind=Kind.PAGE, verb=".*", status=status, headers=headers))
    with pytest.raises(StoreError) as caught:
        VERBS[verb](store_on(fake), large)
    assert "\n" not in str(caught.value)
    assert fake.endpoint in str(caught.value)
    assert "AWS_ENDPOINT_URL_S3" in (caught.value.hint or "")
    assert "AWS_REGION" in (caught.value.hint or "") or status == 200
    assert len(fake.requests) <= (24 if verb == "upload" else 4)
    assert fake.objects == {}


BODIES = {
    "html": b"<!DOCTYPE html><html><body>log in<br></body></html>",
    "xhtml": b"<html><body>log in</body></html>",
    "empty": b"",
    "json": b'{"Contents": []}',
    "other": b"<ListAllMyBucketsResult><Owner/></ListAllMyBucketsResult>",
    "bucket": b"<ListBucketResult><Name>another</Name></ListBucketResult>",
    "nameless": b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>",
}


@pytest.mark.parametrize("body", BODIES)
def test_what_is_no_listing_of_this_bucket_is_never_an_empty_store(fake: FakeS3, body: str) -> None:
    fake.answer = lambda request: Answer(body=BODIES[body])
    with pytest.raises(StoreError, match=f"store s3://fake/.*{fake.endpoint}"):
        list(store_on(fake).list("runs/"))


def test_a_listing_needs_no_namespace(fake: FakeS3) -> None:
    fake.answer = lambda request: Answer(
        body=b"<?xml version='1.0'?>\n<ListBucketResult><Name>fake</Name></ListBucketResult>"
    )
    assert list(store_on(fake).list("")) == []


def test_a_page_between_answers_of_a_store_that_works_is_asked_again(fake: FakeS3) -> None:
    store = store_on(fake)
    store.put("a", b"x")
    fake.faults.append(Fault(kind=Kind.PAGE, verb="GET list-type", status=200, times=2))
    assert [entry.key for entry in store.list("")] == ["a"]
    fake.faults[:] = [Fault(kind=Kind.PAGE, verb=".*", status=302)]
    with pytest.raises(StoreUnavailable, match=r"a redirect \(302\)"):
        list(store.list(""))


PROXIES = {
    "text": b"404 page not found\n",
    "backend": b"default backend - 404",
    "html": PAGE,
    "json": b'{"message": "no Route matched"}',
    "empty": b"",
}


@pytest.mark.parametrize("body", PROXIES)
def test_a_proxys_plain_refusal_is_an_outage_of_a_store_that_has_worked(
    fake: FakeS3, large: Path, body: str
) -> None:
    store = store_on(fake, retry_policy=RetryPolicy(tries=2, first_wait=0.001))
    assert store.put_if_absent("a", b"0123456789")
    for status in (400, 401, 403, 404) if body == "text" else (404,):
        fake.answer = lambda request, status=status: Answer(status=status, body=PROXIES[body])
        for verb in VERBS.values() if status == 404 else (VERBS["get"], VERBS["head"]):
            with pytest.raises(
                StoreUnavailable,
                match=rf"{fake.endpoint}: an answer that is not S3's \({status}\)",
            ):
                verb(store, large)


@pytest.mark.parametrize("body", PROXIES)
def test_a_plain_refusal_of_what_was_never_a_store_is_one_line_at_once(
    fake: FakeS3, large: Path, body: str
) -> None:
    fake.answer = lambda request: Answer(status=404, body=PROXIES[body])
    for verb in VERBS.values() if body == "text" else (VERBS["get"], VERBS["list"]):
        fake.requests.clear()
        with pytest.raises(StoreError, match=f"{fake.endpoint}: an answer that is not") as caught:
            verb(store_on(fake), large)
        assert "\n" not in str(caught.value)
        assert len(fake.requests) <= 24  # of an upload: eight tries of each of three rounds


def test_a_bare_404_to_a_head_is_not_the_stores_word(fake: FakeS3) -> None:
    store = store_on(fake)
    store.put("a", b"0123456789")
    fake.faults.append(Fault(kind=Kind.PAGE, verb="HEAD", status=404, times=1))
    assert store.head("a").size == 10


def test_a_store_that_said_that_an_object_is_missing_has_worked(fake: FakeS3) -> None:
    store = store_on(fake)
    with pytest.raises(ObjectNotFound):
        store.get("a")
    fake.answer = lambda request: Answer(status=404, body=PROXIES["text"])
    with pytest.raises(StoreUnavailable):
        store.get("a")


def test_a_store_that_only_numbers_its_requests_may_say_that_an_object_is_missing(
    fake: FakeS3,
) -> None:
    answer = fake.answer

    def bare(request: Request) -> Answer:
        if request.method in ("GET", "HEAD") and request.key:
            return Answer(status=404, headers={"x-amz-request-id": "1"})
        return answer(request)

    fake.answer = bare
    for find in (store_on(fake).get, store_on(fake).head):
        with pytest.raises(ObjectNotFound):
            find("a")


@pytest.mark.parametrize("size", [10, 9 << 20], ids=["small", "large"])
def test_an_answer_that_is_not_of_s3_leaves_no_connection_half_read(
    fake: FakeS3, size: int
) -> None:
    fake.answer = lambda request: Answer(body=PAGE.ljust(size))
    with pytest.raises(StoreError) as caught:  # holds what was in use
        store_on(fake).get("a")
    port = int(fake.endpoint.rpartition(":")[2])
    sockets = [one for one in gc.get_objects() if type(one) is socket.socket and one.fileno() > 0]
    assert [one for one in sockets if _peer(one) == ("127.0.0.1", port)] == []
    assert caught.value.hint


def _peer(one: socket.socket) -> object:
    """Return the address at the other end; of a server's own sockets that is the client's."""
    try:
        return one.getpeername()
    except OSError:
        return None


def test_a_bucket_that_has_moved_names_its_region(fake: FakeS3) -> None:
    headers = {"x-amz-bucket-region": "eu-west-1"}
    fake.faults.append(Fault(kind=Kind.PAGE, verb=".*", status=301, headers=headers))
    with pytest.raises(StoreError, match="301: Moved Permanently") as caught:
        store_on(fake).get("a")
    assert "AWS_REGION=eu-west-1" in (caught.value.hint or "")


def test_a_wrong_secret_is_still_named_where_a_range_is_asked_for(
    fake: FakeS3, large: Path, tmp_path: Path
) -> None:
    store = store_on(fake)
    store.upload("large", large)
    fault = Fault(kind=Kind.REFUSE, verb="GET", status=403, code="SignatureDoesNotMatch")
    fake.faults.append(fault)
    with pytest.raises(StoreError, match="SignatureDoesNotMatch"):
        store.fetch("large", tmp_path / "target", size=large.stat().st_size)
