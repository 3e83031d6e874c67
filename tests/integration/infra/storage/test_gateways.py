"""What answers in a store's place, or in front of it: login pages, redirects, proxies."""

import gc
import socket

import pytest

from infra.retry import RetryPolicy
from infra.storage.base import ObjectNotFound, StoreUnavailable
from nanochat_core.errors import StoreError
from tests.support.infra.storage.fixtures import Rig
from tests.support.infra.storage.misbehaviour import PAGE, Answer
from tests.support.infra.storage.verbs import VERBS

SEVERAL = ("list", "get", "head", "put", "upload", "fetch", "abort")
MAX_REQUESTS = 24  # of an upload: eight tries of each of three rounds


def refused(rig: Rig, verb: str, match: str, kind: type[StoreError] = StoreError) -> str:
    """Return the hint of the error that a verb raises, which is one line after few requests."""
    rig.requests.clear()
    with pytest.raises(kind, match=match) as caught:
        VERBS[verb](rig.store, "a", rig.large)
    assert "\n" not in str(caught.value)
    assert len(rig.requests) <= (MAX_REQUESTS if verb == "upload" else 6)
    return caught.value.hint or ""


@pytest.mark.parametrize(
    ("use", "status"),
    [(use, status) for use in SEVERAL for status in (200, 302)]
    + [("get", status) for status in (301, 307, 308)],
)
def test_a_web_page_is_one_line_after_few_requests_whatever_was_asked(
    rig: Rig, use: str, status: int
) -> None:
    headers = {"Location": "http://portal.invalid/login"} if status != 200 else {}
    rig.serve_page(".*", status, headers)
    assert "AWS_ENDPOINT_URL_S3, AWS_REGION" in refused(rig, use, rig.endpoint)
    assert rig.objects == {}


BODIES = {
    "html": b"<!DOCTYPE html><html><body>log in<br></body></html>",
    "xhtml": b"<html><body>log in</body></html>",
    "empty": b"",
    "json": b'{"Contents": []}',
    "other": b"<ListAllMyBucketsResult><Owner/></ListAllMyBucketsResult>",
    "bucket": b"<ListBucketResult><Name>another</Name></ListBucketResult>",
    "nameless": b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>",
}


def test_what_is_no_listing_of_this_bucket_is_never_an_empty_store(rig: Rig) -> None:
    for body in BODIES.values():
        rig.answer = lambda request, body=body: Answer(body=body)
        refused(rig, "list", f"store s3://fake/.*{rig.endpoint}")
    named = b"<?xml version='1.0'?>\n<ListBucketResult><Name>fake</Name></ListBucketResult>"
    rig.answer = lambda request: Answer(body=named)  # without a namespace
    assert list(rig.store.list("")) == []


def test_a_page_between_answers_of_a_store_that_works_is_asked_again(rig: Rig) -> None:
    rig.store.put("a", b"0123456789")
    rig.serve_page("GET list-type", 200, times=2)
    assert [entry.key for entry in rig.store.list("")] == ["a"]
    rig.serve_page("HEAD", 404, times=1)  # which is not the store's word that it is missing
    assert rig.store.head("a").size == 10
    rig.arm()
    rig.serve_page(".*", 302)
    with pytest.raises(StoreUnavailable, match=r"a redirect \(302\)"):
        list(rig.store.list(""))


PROXIES = {
    "text": b"404 page not found\n",
    "html": PAGE,
    "json": b'{"message": "no Route matched"}',
    "empty": b"",
}


@pytest.mark.parametrize("body", PROXIES)
def test_a_proxys_plain_refusal_is_an_outage_of_a_store_that_has_worked(
    rig: Rig, body: str
) -> None:
    rig.store = rig.new_store(RetryPolicy(tries=2, first_wait=0.001))
    with pytest.raises(ObjectNotFound):  # which is an answer of a store, too
        rig.store.get("a")
    rig.store.check_conditions()
    for status in (400, 401, 403, 404) if body == "text" else (404,):
        rig.answer = lambda request, status=status: Answer(status=status, body=PROXIES[body])
        for verb in VERBS if status == 404 else ("get", "head"):
            error = rf"{rig.endpoint}: an answer that is not S3's \({status}\)"
            refused(rig, verb, error, StoreUnavailable)


@pytest.mark.parametrize("body", PROXIES)
def test_a_plain_refusal_of_what_was_never_a_store_is_one_line_at_once(rig: Rig, body: str) -> None:
    rig.answer = lambda request: Answer(status=404, body=PROXIES[body])
    for verb in VERBS if body == "text" else ("get", "list"):
        refused(rig, verb, f"{rig.endpoint}: an answer that is not")


@pytest.mark.parametrize("size", [10, 9 << 20], ids=["small", "large"])
def test_an_answer_that_is_not_of_s3_leaves_no_connection_half_read(rig: Rig, size: int) -> None:
    rig.answer = lambda request: Answer(body=PAGE.ljust(size))
    with pytest.raises(StoreError) as caught:  # holds what was in use
        rig.store.get("a")
    port = int(rig.endpoint.rpartition(":")[2])
    sockets = [one for one in gc.get_objects() if type(one) is socket.socket and one.fileno() > 0]
    assert [one for one in sockets if _peer(one) == ("127.0.0.1", port)] == []
    assert caught.value.hint


def _peer(one: socket.socket) -> object:
    """Return the address at the other end; of a server's own sockets that is the client's."""
    try:
        return one.getpeername()
    except OSError:
        return None


def test_a_bucket_that_has_moved_names_its_region(rig: Rig) -> None:
    rig.serve_page(".*", 301, {"x-amz-bucket-region": "eu-west-1"})
    assert "AWS_REGION=eu-west-1" in refused(rig, "get", "301: Moved Permanently")
