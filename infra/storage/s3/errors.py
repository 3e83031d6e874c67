"""Failures of a store across a network: which ones to retry, and how to explain them to a person.

This module makes no requests. An operation without an answer, or with a temporary refusal ("slow
down", a damaged body), is retried as a whole, a bounded number of times. That is safe because each
operation is either idempotent or decided by a condition whose outcome it reads back.
"""

import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from infra.storage.base import ObjectInfo, StoreUnavailable
from nanochat_core.errors import StoreError

_T = TypeVar("_T")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")

# Refusals that a retry may get past.
_PASSING = {
    "BadDigest",  # the body was damaged on its way
    "ConditionalRequestConflict",  # two conditional writes at once
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}
# Request timeout, conflict, too early, too many requests; 5xx are added in `is_passing`.
_PASSING_STATUS = {408, 409, 425, 429}
_NEVER = {"NotImplemented", "NoSuchBucket"}  # never retried, whatever their status
NOT_S3, REDIRECT = "NotS3", "Redirect"  # our codes for what does not come from a store


class NoResponse(Exception):
    """No answer, or a truncated one: the request may or may not have been carried out."""


def describe_loss(kind: str, text: str) -> str:
    """Return why there was no answer, in a few words; `kind` is botocore's name for it."""
    if found := re.search(r"\[Errno -?\d+\] ([^)\]]+)", text):
        return found.group(1).lower()
    return _LOSSES.get(kind, text)


_LOSSES = {
    "ConnectTimeoutError": "no connection in time",
    "ReadTimeoutError": "no answer in time",
    "ConnectionClosedError": "the connection was closed without an answer",
    "ResponseStreamingError": "the answer was cut off",
    "IncompleteReadError": "the answer was cut off",
    "ProtocolError": "the answer was cut off",
    "ResponseParserError": "the answer is not one of S3",
}


class ErrorResponse(Exception):
    """A refusal by the store: an answer with an error code."""

    def __init__(
        self, code: str, *, status: int = 0, message: str = "", headers: Mapping[str, str] = {}
    ) -> None:
        super().__init__(f"{code} {message}".strip())
        self.code = code  # S3's error code, or the status where the answer had none
        self.status = status  # HTTP status; 0: no request was sent
        self.message = message
        self.headers = headers

    @property
    def is_passing(self) -> bool:
        """True if the same request may succeed a moment later."""
        if self.code in _NEVER or self.status == 501:
            return False
        return self.code in _PASSING or self.status >= 500 or self.status in _PASSING_STATUS


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Limits on the retries of one operation."""

    tries: int = 8
    first_wait: float = 0.2  # seconds; doubles each time, with random jitter
    longest_wait: float = 15.0
    deadline: float = 120.0  # seconds after which no new try begins

    def wait(self, tries: int) -> float:
        """Return the seconds to wait after so many tries."""
        # Exponential backoff; the exponent is bounded, since a huge one overflows a float.
        seconds = min(self.first_wait * 2 ** min(tries - 1, 60), self.longest_wait)
        # Jitter: clients that failed together must not all come back together.
        return seconds * random.uniform(0.5, 1.0)


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page of a listing."""

    entries: Sequence[ObjectInfo]
    has_more: bool  # as the store reports it
    token: str | None  # requests the next page; None from stores that give no token


class Changed(Exception):
    """An object that was replaced since its version was read."""


def parse_range(header: str) -> tuple[int, int, int]:
    """Return first byte, last byte and object size of a Content-Range. Raises NoResponse."""
    found = _RANGE.fullmatch(header)
    if not found:
        raise NoResponse(f"the store sent a piece of an object as '{header}'")
    first, last, size = map(int, found.groups())
    return first, last, size


def with_retries(
    operation: Callable[[], _T],
    *,
    retry_policy: Callable[[], RetryPolicy],
    is_passing: Callable[[ErrorResponse], bool],
) -> _T:
    """Return the result of `operation`, retried after NoResponse and temporary refusals.

    `retry_policy` is called after each failure, so its limits may change meanwhile. Raises the last
    NoResponse or ErrorResponse with a note of the tries.
    """
    started, tries = time.monotonic(), 0
    while True:
        tries += 1
        try:
            return operation()
        except (NoResponse, ErrorResponse) as error:
            limits = retry_policy()
            passed = time.monotonic() - started
            wait = limits.wait(tries)
            passing = isinstance(error, NoResponse) or is_passing(error)
            # A wait that would end after the deadline is not begun.
            if not passing or tries >= limits.tries or passed + wait > limits.deadline:
                if tries > 1:
                    error.add_note(f"{tries} tries in {passed:.0f} s")
                raise
            time.sleep(wait)


@dataclass(frozen=True, kw_only=True)
class Where:
    """A store's address and its origin, for error messages."""

    url: str
    bucket: str
    endpoint: str
    setting: str  # the variable or file that sets the endpoint; unused for AWS
    is_aws: bool


def explain(
    error: NoResponse | ErrorResponse, *, where: Where, what: str, was_accepted: bool = False
) -> StoreError:
    """Return the error, with its hint, of a failed operation; `what` is like "put runs/a.json".

    `was_accepted` means that the store accepted a request earlier: if a gateway answers in its
    place now, that is an outage, not a wrong address.
    """
    tries = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    if isinstance(error, NoResponse):
        return StoreUnavailable(
            f"store {where.url} cannot be reached at {where.endpoint}: {error}{tries}",
            hint=f"check {where.setting} and the network, then run the command again"
            if not where.is_aws
            else "check the network, then run the command again",
        )
    # A code says more than a status, which many codes share.
    known = _KNOWN.get(error.code) or _KNOWN.get(str(error.status))
    if known:
        found, hint = (text.format_map(_facts(error, where)) for text in known)
        is_away = was_accepted and error.code in (NOT_S3, REDIRECT)
        kind = StoreUnavailable if is_away else StoreError
        return kind(f"store {where.url}: {found}{tries}", hint=hint)
    said = f"{error.code}: {error.message}" if error.message else error.code
    kind = StoreUnavailable if error.is_passing else StoreError
    return kind(
        f"store {where.url} refuses to {what}: {said}{tries}",
        hint="it is overloaded or out of order; run the command again later"
        if error.is_passing
        else "`nanochat doctor --probe-store` tries everything that is needed of a store",
    )


# By codes or statuses: what was found and the hint, with fields of `_facts`.
_EXPLANATIONS = {
    "NoSuchBucket": (
        "there is no bucket '{bucket}' at {endpoint}",
        "make it with `aws{at} s3 mb s3://{bucket}`, or name another one",
    ),
    "NoCredentials": (
        "no credentials are configured",
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    ),
    "InvalidAccessKeyId": (
        "{endpoint} does not know the access key",
        "check AWS_ACCESS_KEY_ID or AWS_PROFILE, and that they are for this endpoint",
    ),
    "SignatureDoesNotMatch": (
        "{endpoint} does not accept the signature: the secret does not fit the access key",
        "check AWS_SECRET_ACCESS_KEY, and AWS_REGION if the store has a region of its own",
    ),
    "ExpiredToken InvalidToken TokenRefreshRequired": (
        "the credentials have expired",
        "log in again, or set new AWS_... variables",
    ),
    "RequestTimeTooSkewed RequestExpired": (
        "this machine's clock is {skew}",
        "set this machine's clock, for example with NTP",
    ),
    "PermanentRedirect AuthorizationHeaderMalformed IllegalLocationConstraintException 301": (
        "bucket '{bucket}' is in {region}",
        "set AWS_REGION={region_name}, and the endpoint if it names a region",
    ),
    f"{REDIRECT} TemporaryRedirect 302 303 307 308": (
        "{endpoint} answers with a redirect ({status}){target}",
        "the bucket is in another region or at another endpoint, or a login page or proxy is in "
        "the way: check AWS_REGION, {setting} and the network",
    ),
    NOT_S3: (
        "{endpoint} answers with {message} (status {status})",
        "a login page, a proxy or another web server answers in the store's place: check "
        "{setting} and the network, then run the command again",
    ),
    "AccessDenied 403": (
        "access denied{said}",
        "allow s3:GetObject, PutObject, DeleteObject, AbortMultipartUpload on {url}/* and "
        "ListBucket, ListBucketMultipartUploads on s3://{bucket}; without ListBucket what is "
        "missing looks forbidden",
    ),
}
_KNOWN = {code: texts for codes, texts in _EXPLANATIONS.items() for code in codes.split()}


def _facts(error: ErrorResponse, where: Where) -> Mapping[str, object]:
    """Return the fields of the texts of an explanation."""
    expected = re.search(r"expecting '([a-z0-9-]+)'", error.message)
    region = error.headers.get("x-amz-bucket-region") or (expected and expected.group(1))
    target = error.headers.get("location")
    return {
        **vars(where),
        "at": "" if where.is_aws else f" --endpoint-url {where.endpoint}",
        "status": error.status,
        "message": error.message,
        "said": f": {error.message}" if error.message else "",
        "skew": _skew(find_date(error.headers)),
        "region": f"region {region}" if region else "another region",
        "region_name": region or "...",
        "target": f" to {target[:200]!r}" if target else "",
    }


def _skew(theirs: float | None) -> str:
    """Return by how much our clock differs from the store's, which a refusal itself carries."""
    if theirs is None:
        return "wrong"
    ours = time.time()
    side = "ahead of" if ours > theirs else "behind"
    return f"{abs(ours - theirs) / 60:.0f} min {side} the store's"


def field_of(answer: Mapping[str, Any], name: str) -> Any:
    """Return a field that every such answer of S3 has. Raises NoResponse if it lacks it."""
    if name not in answer:
        raise NoResponse(f"the store's answer has no {name}")
    return answer[name]


def find_date(headers: Mapping[str, str]) -> float | None:
    """Return the store's clock when it answered, in unix seconds; None means no valid date."""
    try:
        return parsedate_to_datetime(headers["date"]).timestamp()
    except (KeyError, ValueError):
        return None


def version_of(answer: Any) -> str:
    """Return an object's version: its ETag without quotes, which some servers omit."""
    return answer.get("ETag", "").strip('"')
