"""Operations are repeated for passing reasons, for a while; errors name a remedy."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from botocore import exceptions as boto  # pyright: ignore[reportMissingTypeStubs]

from infra.retry import RetryPolicy
from infra.storage.base import BadObject, StoreUnavailable
from infra.storage.s3.errors import NoResponse, code_of
from infra.storage.s3.store import S3Store
from nanochat_core.errors import StoreError

ENDPOINT = "http://127.0.0.1:9000"


def refusal(code: str, status: int, message: str = "", **headers: str) -> boto.ClientError:
    """What botocore makes of an answer with an error."""
    answer: Any = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers},
    }
    return boto.ClientError(answer, "Verb")


def put(*errors: Exception, has_worked: bool = True) -> None:
    """Write to a store whose client raises these errors and then answers."""
    left = iter(errors)

    def put_object(**_: Any) -> dict[str, str]:
        for error in left:
            raise error
        return {"ETag": ""}

    policy = RetryPolicy(tries=5, first_wait=0.001, longest_wait=0.002)
    store = S3Store("s3://bucket/p", retry_policy=policy)
    store.client = SimpleNamespace(meta=SimpleNamespace(endpoint_url=ENDPOINT))
    store.client.put_object = put_object
    store.has_accepted = has_worked
    store.put("a/b", b"")


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
        refusal("Busy", 429),
        refusal("404", 404),
        refusal("", 403),
    ],
    ids=code_of,
)
def test_what_may_pass_is_tried_again(error: Exception) -> None:
    put(error, error, error, error)


def refused(error: Exception) -> tuple[str, str]:
    """Return message and hint of an error that is reported at once."""
    with pytest.raises(StoreError) as caught:
        put(error, ValueError("asked again"))
    assert caught.value.__cause__ is error
    assert "\n" not in str(caught.value)
    return str(caught.value), caught.value.hint or ""


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (refusal("NoSuchBucket", 404), f"aws --endpoint-url {ENDPOINT} s3 mb s3://bucket"),
        (refusal("InvalidAccessKeyId", 403), "AWS_ACCESS_KEY_ID"),
        (refusal("ExpiredToken", 400), "log in again"),
        (refusal("RequestTimeTooSkewed", 403), "NTP"),
        (refusal("AccessDenied", 403), "s3:GetObject"),
        (refusal("403", 403, **{"x-amz-request-id": "1"}), "s3:GetObject"),
        (refusal("301", 301, **{"x-amz-bucket-region": "eu-west-1"}), "AWS_REGION=eu-west-1"),
        (refusal("NotImplemented", 501), "nanochat doctor"),
        (refusal("InvalidArgument", 400), "NANOCHAT_S3_ADDRESSING"),
        (refusal("PreconditionFailed", 412), "nanochat doctor"),
        (boto.NoCredentialsError(), "AWS_PROFILE"),
    ],
    ids=lambda value: value if isinstance(value, str) else code_of(value),
)
def test_what_will_not_pass_is_reported_at_once_with_its_remedy(
    error: Exception, hint: str
) -> None:
    message = "of a message\nin lines"
    if isinstance(error, boto.ClientError):
        vars(error)["response"]["Error"]["Message"] = message
    found = refused(error)
    assert hint in found[1]
    assert found[0].startswith(f"store s3://bucket/p refuses to put a/b: {code_of(error)}: ")


def test_a_wrong_secret_is_reported_at_once() -> None:
    """Of a store that has worked it is a body that was damaged on its way."""
    with pytest.raises(StoreError) as caught:
        put(refusal("SignatureDoesNotMatch", 403), ValueError("asked again"), has_worked=False)
    assert "wrong secret for this access key" in (caught.value.hint or "")


REFUSED = "<Connection object at 0x7f>: Failed: [Errno 111] Connection refused"
NOWHERE = "Failed to resolve 'nowhere' ([Errno -2] Name or service not known)"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NoResponse("number"), "failed to put a/b at {}: number"),
        (refusal("404", 404, "Not Found"), "at {}: an answer that is not S3's (404): Not Found"),
        *(
            (boto.EndpointConnectionError(endpoint_url=ENDPOINT, error=error), text)
            for error, text in (
                (REFUSED, "store s3://bucket/p cannot be reached at {}: connection refused"),
                (NOWHERE, "name or service not known"),
            )
        ),
    ],
)
def test_why_no_server_answered_is_said_in_a_few_words_after_the_last_try(
    error: Exception, text: str
) -> None:
    with pytest.raises(StoreUnavailable) as caught:
        put(*[error] * 5, ValueError("asked again"))
    assert str(caught.value).endswith(text.format(ENDPOINT))
    assert "login page" in (caught.value.hint or "")


def test_an_object_without_a_length_is_not_read() -> None:
    store, body = S3Store("s3://bucket/p"), io.BytesIO(b"endless")
    store.client = SimpleNamespace(get_object=lambda **_: {"ETag": "", "Body": body})
    with pytest.raises(BadObject):
        store.get("a/b")
    assert body.closed
