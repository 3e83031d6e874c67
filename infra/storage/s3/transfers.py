"""Transfers of large files by boto3's transfer manager: in parts, several at once.

Each part is sent or fetched again by the policy of all requests. `S3Store` begins a transfer again
if the store lost it, or if the object was replaced meanwhile.
"""

import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from botocore.exceptions import ClientError  # pyright: ignore[reportMissingTypeStubs]
from s3transfer.manager import (  # pyright: ignore[reportMissingTypeStubs]
    TransferConfig,
    TransferManager,
)
from s3transfer.subscribers import BaseSubscriber  # pyright: ignore[reportMissingTypeStubs]

from infra.parallel import THREADS
from infra.retry import RetryPolicy
from infra.storage.base import OnBytes
from infra.storage.s3.errors import NoResponse
from nanochat_core.errors import StoreError

PART = 16 << 20  # bytes
_VERBS = ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "GetObject")


def make_manager(
    client: Any, policy: RetryPolicy, is_transient: Callable[[Exception], bool]
) -> Any:
    """Return the manager of all uploads and downloads of a client, which share their threads.

    Requests of parts are repeated while their error `is_transient`.
    """
    for verb in _VERBS:
        wait = partial(_wait, policy, is_transient)
        client.meta.events.register(f"needs-retry.s3.{verb}", wait, verb)
    return TransferManager(
        client,
        TransferConfig(
            multipart_threshold=PART,
            multipart_chunksize=PART,
            max_request_concurrency=THREADS,
            max_io_queue_size=4 * THREADS,
            num_download_attempts=int(policy.tries),  # of a body that is cut off
        ),
    )


def _wait(
    policy: RetryPolicy, is_transient: Callable[[Exception], bool], **event: Any
) -> float | None:
    """Handle botocore's event `needs-retry`: seconds to wait; None means no other try."""
    request, attempts = event["request_dict"], event["attempts"]
    is_range = "Range" in request["headers"]
    if request["method"] == "GET" and not is_range:
        return None  # a record or small file: `S3Store` repeats it
    error: Exception | None = event["caught_exception"]
    parsed: Any = event["response"][1] if event["response"] else {}
    if "Error" in parsed:
        error = ClientError(parsed, "")
    elif error is None and is_range and not _is_whole_part(parsed):
        parsed["Body"].close()
        error = NoResponse("the store sends less of a part than it says")
        if attempts >= policy.tries:
            raise error
    if error is None or not is_transient(error) or attempts >= policy.tries:
        return None
    return policy.wait(attempts)


def _is_whole_part(answer: Any) -> bool:
    """Return whether an answer has the length of its range; raise StoreError if it has none."""
    if "ContentRange" not in answer:
        answer["Body"].close()
        raise StoreError(
            "the store answers a range request with the whole object",
            hint="use a store that reads ranges; a proxy before it may ignore them",
        )
    first, last = map(int, re.findall(r"\d+", answer["ContentRange"])[:2])
    return answer.get("ContentLength") == last - first + 1


class Progress(BaseSubscriber):
    """Bytes of a transfer, each reported once however often the transfer is repeated."""

    def __init__(self, on_bytes: OnBytes) -> None:
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._done = self._reported = 0
        self._etag = ""

    def begin(self, etag: str = "") -> "Progress":
        """Begin, or begin again, at the first byte of the object with this etag, if it has one."""
        self._done, self._etag = 0, etag
        return self

    def on_progress(self, future: Any, bytes_transferred: int, **_: object) -> None:
        """Count bytes; a negative number means that they are transferred again."""
        with self._lock:
            self._done += bytes_transferred
            new = self._done - self._reported
            self._reported = max(self._done, self._reported)
        if new > 0:
            self._on_bytes(new)

    def on_queued(self, future: Any, **_: object) -> None:
        """Handle the manager's event: each part must be of the object with the etag."""
        if self._etag:
            future.meta.provide_object_etag(f'"{self._etag}"')
