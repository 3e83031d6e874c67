"""Failures of a bucket: which ones to retry, and how to explain them to a user."""

import http.client
import os
import re
from typing import Any

import urllib3.exceptions
from botocore import exceptions as boto  # pyright: ignore[reportMissingTypeStubs]
from botocore.parsers import ResponseParserError  # pyright: ignore[reportMissingTypeStubs]
from s3transfer.exceptions import (  # pyright: ignore[reportMissingTypeStubs]
    RetriesExceededError,
    S3ValidationError,
)

from infra.storage.base import StoreUnavailable
from nanochat_core.errors import StoreError


class NoResponse(Exception):
    """An answer that is cut short or not of this store: the request may have been carried out."""


class Replaced(NoResponse):
    """An object that another writer, or a lost upload, replaced during its transfer."""


# No answer: whether the store carried the request out is not known.
LOST = (
    *(NoResponse, boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError),
    *(ResponseParserError, urllib3.exceptions.HTTPError, http.client.HTTPException),
    *(ConnectionError, TimeoutError, RetriesExceededError, S3ValidationError),
)
FAILURES = (*LOST, boto.ClientError, boto.BotoCoreError)
# Refusals that a retry may get past, in addition to those with a status of 500 and more.
_TRANSIENT = {
    *("BadDigest", "IncompleteBody", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"),
    *("ConditionalRequestConflict", "OperationAborted", "InternalError", "RequestTimeout"),
    *("ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests"),
}
_TRANSIENT_STATUS = {408, 409, 425, 429}  # timeout, conflict, too early, too many requests
LOST_UPLOAD = {"NoSuchUpload", "InvalidPart", "InvalidPartOrder"}  # or a part of it is lost
_NEVER = {"NotImplemented", "NoSuchBucket"}  # never retried, whatever their status


def code_of(error: Exception) -> str:
    """Return S3's code of an error, else the answer's status, else the exception's name."""
    status = status_of(error)
    return _part_of(error, "Error").get("Code") or (str(status) if status else type(error).__name__)


def status_of(error: BaseException | None) -> int:
    """Return the HTTP status of an error; 0 if it is not an answer."""
    return _part_of(error, "ResponseMetadata").get("HTTPStatusCode", 0)


def _part_of(error: BaseException | None, name: str) -> dict[str, Any]:
    """Return a part of the answer that is an error; empty if it is not an answer."""
    answer: Any = vars(error)["response"] if isinstance(error, boto.ClientError) else {}
    return answer.get(name, {})


def is_lost(error: Exception) -> bool:
    """Return whether the store itself did not answer: no server did, or a proxy or login page."""
    if not isinstance(error, boto.ClientError):
        return isinstance(error, LOST)
    # S3 explains an error by a code. An answer without one, as each to a HEAD, has S3's headers.
    headers = _part_of(error, "ResponseMetadata").get("HTTPHeaders", {})
    return code_of(error).isdigit() and not any(name.startswith("x-amz-") for name in headers)


def is_transient(error: Exception) -> bool:
    """Return whether the same request may succeed a moment later."""
    code, status = code_of(error), status_of(error)
    if is_lost(error):
        return True
    if code in _NEVER or status == 501:
        return False
    return code in _TRANSIENT or status >= 500 or status in _TRANSIENT_STATUS


# Hints by S3's codes, statuses and botocore's exceptions.
_HINTS = {
    "NoSuchBucket": (
        "make it with `aws --endpoint-url {endpoint} s3 mb s3://{bucket}`, or name another one"
    ),
    "NoCredentialsError PartialCredentialsError": (
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    ),
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID or AWS_PROFILE, and the endpoint",
    "SignatureDoesNotMatch": (
        "wrong secret for this access key: check AWS_SECRET_ACCESS_KEY, and AWS_REGION if "
        "the store has a region of its own"
    ),
    "ExpiredToken InvalidToken TokenRefreshRequired": "log in again, or set new AWS_... variables",
    "RequestTimeTooSkewed RequestExpired": "set this machine's clock, for example with NTP",
    "PermanentRedirect AuthorizationHeaderMalformed IllegalLocationConstraintException 301": (
        "set AWS_REGION={region}, and the endpoint if it names a region"
    ),
    "AccessDenied 403": (
        "allow s3:GetObject, PutObject, DeleteObject, AbortMultipartUpload on {url}/* and "
        "ListBucket, ListBucketMultipartUploads on s3://{bucket}; without ListBucket what is "
        "missing looks forbidden"
    ),
}
_PROBE = "try NANOCHAT_S3_ADDRESSING or another store; `nanochat doctor` tries all that is needed"
_HINT_OF = {code: hint for codes, hint in _HINTS.items() for code in codes.split()}


def endpoint_setting() -> str:
    """Return the variable that sets the endpoint, or the file that must have set it."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if os.environ.get(name):
            return name
    return "endpoint_url in ~/.aws/config"


def explain(error: Exception, *, what: str, url: str, endpoint: str) -> StoreError:
    """Return the error, with its hint, of a failed operation; `what` is like "put runs/a.json"."""
    code = code_of(error)
    text = str(getattr(error, "kwargs", {}).get("error", error))
    message = _part_of(error, "Error").get("Message", "") if status_of(error) else text
    if found := re.search(r"\[Errno -?\d+\] ([^)\]]+)", message):
        message = found.group(1).lower()
    message = " ".join(message.split())
    if is_lost(error):
        failed = f"failed to {what}" if isinstance(error, NoResponse) else "cannot be reached"
        code = f"an answer that is not S3's ({code}): " if code.isdigit() else ""
        return StoreUnavailable(
            f"store {url} {failed} at {endpoint}: {code}{message}",
            hint=f"check {endpoint_setting()}, AWS_REGION and the network (a login page or proxy "
            "may be in the way), then run the command again",
        )
    failed = f"store {url} refuses to {what}: {code}: {message}"
    if is_transient(error):
        hint = "it is overloaded or out of order; run the command again later"
        return StoreUnavailable(failed, hint=hint)
    region = _part_of(error, "ResponseMetadata").get("HTTPHeaders", {}).get("x-amz-bucket-region")
    facts = {"url": url, "endpoint": endpoint, "bucket": url.split("/")[2]}
    hint = _HINT_OF.get(code, _PROBE).format(region=region or "...", **facts)
    return StoreError(failed, hint=hint)
