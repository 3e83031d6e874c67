"""Operations are repeated for passing reasons, for a while; people are told what to do."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from botocore import exceptions as boto  # pyright: ignore[reportMissingTypeStubs]

from infra.retry import RetryPolicy
from infra.storage.base import StoreUnavailable
from infra.storage.s3.errors import NoResponse, code_of, explain
from infra.storage.s3.store import S3Store
from nanochat_core.errors import StoreError

QUICK = RetryPolicy(tries=5, first_wait=0.001, longest_wait=0.002)
ENDPOINT = "http://127.0.0.1:9000"


def refusal(code: str, status: int, message: str = "", **headers: str) -> boto.ClientError:
    """What botocore makes of an answer with an error."""
    answer: Any = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers},
    }
    return boto.ClientError(answer, "Verb")


def failing(*errors: Exception) -> Callable[[], str]:
    """An operation that fails so many times, then gives "done"."""
    left: Iterator[Exception] = iter(errors)

    def operation() -> str:
        for error in left:
            raise error
        return "done"

    return operation


def run(operation: Callable[[], str], retry_policy: RetryPolicy = QUICK) -> str:
    store = S3Store("s3://bucket/p", retry_policy=retry_policy)
    store.client = SimpleNamespace(meta=SimpleNamespace(endpoint_url=ENDPOINT))
    store.has_accepted = True
    return store._retry("put a", operation)


@pytest.mark.parametrize(
    "error",
    [
        NoResponse("cut"),
        boto.ConnectionClosedError(endpoint_url=ENDPOINT),
        refusal("SlowDown", 503),
        refusal("BadDigest", 400),
        refusal("SignatureDoesNotMatch", 403),
        refusal("ConditionalRequestConflict", 409),
        refusal("RequestTimeout", 400),
        refusal("InternalError", 200),
        refusal("500", 500),
        refusal("429", 429),
        refusal("404", 404),
        refusal("", 403),
    ],
    ids=code_of,
)
def test_what_may_pass_is_tried_again(error: Exception) -> None:
    assert run(failing(error, error, error, error)) == "done"


@pytest.mark.parametrize(
    "error",
    [
        refusal("AccessDenied", 403),
        refusal("NoSuchBucket", 404),
        refusal("NotImplemented", 501),
        refusal("InvalidArgument", 400),
        refusal("PreconditionFailed", 412),
        refusal("403", 403, **{"x-amz-request-id": "1"}),
        boto.NoCredentialsError(),
    ],
    ids=code_of,
)
def test_what_will_not_pass_is_reported_at_once(error: Exception) -> None:
    with pytest.raises(StoreError) as caught:
        run(failing(error, ValueError("asked again")))
    assert caught.value.__cause__ is error
    assert "tries" not in str(caught.value)


def test_tries_are_counted_and_the_last_failure_is_reported() -> None:
    errors = [NoResponse(f"number {n}") for n in range(9)]
    with pytest.raises(StoreUnavailable, match=r"number 4 \(5 tries in 0 s\)$"):
        run(failing(*errors))


def explained(error: Exception) -> tuple[str, str]:
    found = explain(error, what="put a/b", url="s3://bucket/p", endpoint=ENDPOINT)
    assert "\n" not in str(found)
    return str(found), found.hint or ""


def test_each_refusal_that_a_person_can_do_something_about_says_what() -> None:
    found, hint = explained(refusal("NoSuchBucket", 404, "it\ndoes not exist"))
    assert found == "store s3://bucket/p refuses to put a/b: NoSuchBucket: it does not exist"
    assert f"aws --endpoint-url {ENDPOINT} s3 mb s3://bucket" in hint
    hints = {
        "InvalidAccessKeyId": "AWS_ACCESS_KEY_ID",
        "SignatureDoesNotMatch": "AWS_SECRET_ACCESS_KEY",
        "ExpiredToken": "log in again",
        "RequestTimeTooSkewed": "NTP",
        "AccessDenied": "s3:GetObject",
        "Odd": "nanochat doctor",
    }
    for code, part in hints.items():
        assert part in explained(refusal(code, 403))[1]
    assert "s3:GetObject" in explained(refusal("403", 403, **{"x-amz-request-id": "1"}))[1]
    assert "AWS_PROFILE" in explained(boto.NoCredentialsError())[1]
    region = {"x-amz-bucket-region": "eu-west-1"}
    assert "AWS_REGION=eu-west-1" in explained(refusal("301", 301, **region))[1]


def test_why_no_server_answered_is_said_in_a_few_words() -> None:
    refused = "<Connection object at 0x7f>: Failed: [Errno 111] Connection refused"
    error = boto.EndpointConnectionError(endpoint_url=ENDPOINT, error=refused)
    assert (
        explained(error)[0]
        == f"store s3://bucket/p cannot be reached at {ENDPOINT}: connection refused"
    )
    nowhere = "Failed to resolve 'nowhere' ([Errno -2] Name or service not known)"
    error = boto.EndpointConnectionError(endpoint_url=ENDPOINT, error=nowhere)
    assert explained(error)[0].endswith(": name or service not known")
    found, hint = explained(refusal("404", 404, "Not Found"))
    assert found.endswith(f"at {ENDPOINT}: an answer that is not S3's (404): Not Found")
    assert "login page" in hint
