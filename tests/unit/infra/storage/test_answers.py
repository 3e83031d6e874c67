"""Operations are repeated for passing reasons, for a while; people are told what to do."""

import time
from collections.abc import Callable, Iterator

import pytest

from infra.storage.s3.errors import (
    ErrorResponse,
    NoResponse,
    RetryPolicy,
    Where,
    describe_loss,
    explain,
    parse_range,
    with_retries,
)

QUICK = RetryPolicy(tries=5, first_wait=0.001, longest_wait=0.002)
WHERE = Where(
    url="s3://b/p",
    bucket="b",
    endpoint="http://127.0.0.1:9000",
    setting="AWS_ENDPOINT_URL_S3",
    is_aws=False,
)


def failing(*errors: Exception) -> Callable[[], str]:
    """An operation that fails so many times, then gives "done"."""
    left: Iterator[Exception] = iter(errors)

    def operation() -> str:
        for error in left:
            raise error
        return "done"

    return operation


def run(operation: Callable[[], str], retry_policy: RetryPolicy = QUICK) -> str:
    return with_retries(
        operation, retry_policy=lambda: retry_policy, is_passing=lambda refused: refused.is_passing
    )


@pytest.mark.parametrize(
    "error",
    [
        NoResponse("cut"),
        ErrorResponse("SlowDown", status=503),
        ErrorResponse("BadDigest", status=400),
        ErrorResponse("ConditionalRequestConflict", status=409),
        ErrorResponse("RequestTimeout", status=400),
        ErrorResponse("InternalError", status=200),
        ErrorResponse("500", status=500),
        ErrorResponse("429", status=429),
    ],
)
def test_what_may_pass_is_tried_again(error: Exception) -> None:
    assert run(failing(error, error, error, error)) == "done"


@pytest.mark.parametrize(
    "error",
    [
        ErrorResponse("AccessDenied", status=403),
        ErrorResponse("NoSuchBucket", status=404),
        ErrorResponse("NotImplemented", status=501),
        ErrorResponse("InvalidArgument", status=400),
        ErrorResponse("PreconditionFailed", status=412),
        ErrorResponse("NoCredentials"),
    ],
)
def test_what_will_not_pass_is_reported_at_once(error: ErrorResponse) -> None:
    with pytest.raises(ErrorResponse) as caught:
        run(failing(error, ValueError("asked again")))
    assert caught.value is error
    assert not hasattr(error, "__notes__")


def test_tries_are_counted_and_the_last_failure_is_reported() -> None:
    errors = [NoResponse(f"number {n}") for n in range(9)]
    with pytest.raises(NoResponse, match="number 4") as caught:
        run(failing(*errors))
    assert caught.value.__notes__ == ["5 tries in 0 s"]


def test_no_try_begins_after_the_deadline() -> None:
    retry_policy = RetryPolicy(tries=1000, first_wait=0.04, longest_wait=0.04, deadline=0.2)
    tried: list[None] = []

    def operation() -> str:
        tried.append(None)
        raise NoResponse("")

    with pytest.raises(NoResponse):
        run(operation, retry_policy)
    assert len(tried) <= 11  # each wait is 0.02 s at least


def test_waits_stay_numbers_however_often_it_is_tried() -> None:
    retry_policy = RetryPolicy(tries=1200, first_wait=0.0, longest_wait=0.0, deadline=60)
    with pytest.raises(NoResponse) as caught:
        run(failing(*[NoResponse("") for _ in range(1200)]), retry_policy)
    assert caught.value.__notes__[0].startswith("1200 tries")


def explained(code: str, status: int = 403, message: str = "", **headers: str) -> tuple[str, str]:
    error = explain(
        ErrorResponse(code, status=status, message=message, headers=headers),
        where=WHERE,
        what="put a/b",
    )
    assert "\n" not in str(error)
    return str(error), error.hint or ""


def test_each_refusal_that_a_person_can_do_something_about_says_what() -> None:
    found, hint = explained("NoSuchBucket", 404)
    assert found == "store s3://b/p: there is no bucket 'b' at http://127.0.0.1:9000"
    assert "aws --endpoint-url http://127.0.0.1:9000 s3 mb s3://b" in hint
    assert "AWS_ACCESS_KEY_ID" in explained("InvalidAccessKeyId")[1]
    assert "AWS_SECRET_ACCESS_KEY" in explained("SignatureDoesNotMatch")[1]
    assert "AWS_PROFILE" in explained("NoCredentials", 0)[1]
    assert "log in again" in explained("ExpiredToken", 400)[1]
    assert "s3:GetObject" in explained("AccessDenied")[1]
    assert "s3:GetObject" in explained("403")[1]
    assert "doctor --probe-store" in explained("Odd", 400, "what is this")[1]
    assert explained("Odd", 400, "what is this")[0].endswith(
        "refuses to put a/b: Odd: what is this"
    )


def test_a_wrong_clock_is_reported_with_its_difference() -> None:
    from email.utils import formatdate

    late = formatdate(time.time() + 16 * 60, usegmt=True)
    assert "clock is 16 min behind the store's" in explained("RequestTimeTooSkewed", date=late)[0]
    early = formatdate(time.time() - 3600, usegmt=True)
    assert "clock is 60 min ahead of" in explained("RequestTimeTooSkewed", date=early)[0]


def test_a_bucket_elsewhere_is_reported_with_its_region() -> None:
    header = {"x-amz-bucket-region": "eu-west-1"}
    error = explain(ErrorResponse("301", status=301, headers=header), where=WHERE, what="look at a")
    assert "AWS_REGION=eu-west-1" in (error.hint or "")
    said = "the region 'us-east-1' is wrong; expecting 'eu-central-1'"
    assert "AWS_REGION=eu-central-1" in explained("AuthorizationHeaderMalformed", 400, said)[1]


def test_why_no_server_answered_is_said_in_a_few_words() -> None:
    text = "<Connection object at 0x7f>: Failed: [Errno 111] Connection refused"
    assert describe_loss("EndpointConnectionError", text) == "connection refused"
    text = "Failed to resolve 'nowhere' ([Errno -2] Name or service not known)"
    assert describe_loss("EndpointConnectionError", text) == "name or service not known"
    assert describe_loss("ReadTimeoutError", "Read timeout on endpoint") == "no answer in time"


def test_a_range_that_cannot_be_read_is_as_good_as_no_answer() -> None:
    assert parse_range("bytes 0-9/100") == (0, 9, 100)
    for told in ("", "bytes */100", "bytes 0-9/*", "0-9/100"):
        with pytest.raises(NoResponse):
            parse_range(told)
