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

# Of an upload eight tries in each of three rounds; of a HEAD, in three tries, also those to find
# the bucket's region and to explain the error.
MAX_REQUESTS = {"upload": 24, "head": 9}
AWAY = {"Location": "http://portal.invalid/login"}
GATEWAYS = {
    "page": Answer(body=PAGE),
    **{f"redirect {n}": Answer(status=n, body=PAGE, headers=AWAY) for n in (301, 302, 307, 308)},
    **{f"text {n}": Answer(status=n, body=b"not found\n") for n in (400, 401, 403, 404)},
    "page 404": Answer(status=404, body=PAGE),
    "json 404": Answer(status=404, body=b'{"message": "no Route matched"}'),
    "nothing 404": Answer(status=404),
}
ASKED_EVERYTHING = ("page", "redirect 302", "text 404")  # of the others a few verbs show enough


def refused(rig: Rig, verb: str, match: str, kind: type[StoreError] = StoreError) -> str:
    """Return the hint of the error that a verb raises, which is one line after few requests."""
    rig.requests.clear()
    with pytest.raises(kind, match=match) as caught:
        VERBS[verb](rig.store, "a", rig.large)
    assert "\n" not in str(caught.value)
    assert len(rig.requests) <= MAX_REQUESTS.get(verb, 6)
    return caught.value.hint or ""


@pytest.mark.parametrize("has_worked", [False, True])
@pytest.mark.parametrize("gateway", GATEWAYS)
def test_what_a_gateway_answers_is_an_outage_in_one_line_after_few_requests(
    rig: Rig, gateway: str, *, has_worked: bool
) -> None:
    if has_worked:
        rig.store = rig.new_store(RetryPolicy(tries=2, first_wait=0.001))
        with pytest.raises(ObjectNotFound):  # which is an answer of a store, too
            rig.store.get("a")
        rig.store.check_conditions()
    answer = GATEWAYS[gateway]
    rig.answer = lambda request: answer
    says = {3: "a redirect", 4: "an answer that is not S3's"}.get(answer.status // 100)
    match = rf"{rig.endpoint}: {says} \({answer.status}\)" if says else rig.endpoint
    for verb in VERBS if gateway in ASKED_EVERYTHING else ("get", "head", "list"):
        hint = refused(rig, verb, match, StoreUnavailable)
        assert "AWS_ENDPOINT_URL_S3, AWS_REGION" in hint
    assert rig.objects == {}


LISTINGS = {
    "xhtml": b"<html><body>log in</body></html>",
    "other": b"<ListAllMyBucketsResult><Owner/></ListAllMyBucketsResult>",
    "bucket": b"<ListBucketResult><Name>another</Name></ListBucketResult>",
    "nameless": b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>",
    "json": b'{"Contents": []}',
    "empty": b"",
}


def test_what_is_no_listing_of_this_bucket_is_never_an_empty_store(rig: Rig) -> None:
    for body in LISTINGS.values():
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
