"""Transfers of large files by boto3's transfer manager: in parts, several at once.

Each part is sent or fetched again by the policy of all requests. `S3Store` begins a transfer again
if the store lost it, or if the object was replaced meanwhile.
"""

import contextlib
import re
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError  # pyright: ignore[reportMissingTypeStubs]
from s3transfer.exceptions import (  # pyright: ignore[reportMissingTypeStubs]
    S3DownloadFailedError,
)
from s3transfer.manager import (  # pyright: ignore[reportMissingTypeStubs]
    TransferConfig,
    TransferManager,
)
from s3transfer.subscribers import BaseSubscriber  # pyright: ignore[reportMissingTypeStubs]

from infra.retry import RetryPolicy
from infra.storage.base import ObjectInfo, OnBytes
from infra.storage.s3.client import THREADS
from infra.storage.s3.errors import NoResponse, code_of, is_transient
from nanochat_core.errors import StoreError

PART = 16 << 20  # bytes
ROUNDS = 3  # tries of a whole transfer
# The store lost the upload or a part of it.
LOST_UPLOAD = {"NoSuchUpload", "InvalidPart", "InvalidPartOrder"}
_VERBS = ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "GetObject")


class Transfers:
    """Uploads to and downloads from one bucket, which share their threads."""

    def __init__(self, client: Any, bucket: str, retry_policy: RetryPolicy) -> None:
        self._bucket = bucket
        self._retry_policy = retry_policy
        for verb in _VERBS:
            client.meta.events.register(f"needs-retry.s3.{verb}", self._wait_before_retry, verb)
        self._manager: Any = TransferManager(
            client,
            TransferConfig(
                multipart_threshold=PART,
                multipart_chunksize=PART,
                max_request_concurrency=THREADS,
                max_io_queue_size=4 * THREADS,
                num_download_attempts=int(retry_policy.tries),  # of a body that is cut off
            ),
        )

    def upload(
        self, key: str, path: Path, progress: "Progress", has_upload: Callable[[int, str], bool]
    ) -> None:
        """Write a file as an object.

        `has_upload` returns whether the object has a size and is of the upload with a tag.
        """
        size, tag = path.stat().st_size, uuid.uuid4().hex
        extra, watch = {"Metadata": {"upload": tag}}, [_Watch(progress.begin())]
        try:
            self._manager.upload(str(path), self._bucket, key, extra, watch).result()
        except ClientError as error:
            # The upload is also unknown if it was completed and only the answer was lost.
            if code_of(error) != "NoSuchUpload" or not has_upload(size, tag):
                raise
            return
        if not has_upload(size, tag):
            raise NoResponse(f"the store does not show the {size} bytes sent")

    def download(self, key: str, path: Path, found: ObjectInfo, progress: "Progress") -> None:
        """Write an object to a file. Raises NoResponse if the object was replaced meanwhile."""
        watch = _Watch(progress.begin(), etag=found.etag)
        with contextlib.suppress(S3DownloadFailedError):  # If-Match does not hold
            self._manager.download(self._bucket, key, str(path), {}, [watch]).result()
            if path.stat().st_size == found.size:
                return
        raise NoResponse("the object was replaced while it was fetched")

    def _wait_before_retry(
        self, response: Any, attempts: int, caught_exception: Any, request_dict: Any, **_: object
    ) -> float | None:
        """Handle botocore's event `needs-retry`: seconds to wait; None means no other try."""
        is_range = "Range" in request_dict["headers"]
        if request_dict["method"] == "GET" and not is_range:
            return None  # a record or small file: `S3Store` repeats it
        error: Exception | None = caught_exception
        parsed: Any = response[1] if response else {}
        if "Error" in parsed:
            error = ClientError(parsed, "")
        elif error is None and is_range and not _is_whole_part(parsed):
            parsed["Body"].close()
            error = NoResponse("the store sends less of a part than it says")
            if attempts >= self._retry_policy.tries:
                raise error
        if error is None or not is_transient(error) or attempts >= self._retry_policy.tries:
            return None
        return self._retry_policy.wait(attempts)


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


class Progress:
    """Bytes of a transfer, each reported once however often the transfer is repeated."""

    def __init__(self, on_bytes: OnBytes) -> None:
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._done = self._reported = 0

    def begin(self) -> "Progress":
        """Begin, or begin again, at the first byte."""
        self._done = 0
        return self

    def add(self, count: int) -> None:
        """Count bytes; a negative number means that they are transferred again."""
        with self._lock:
            self._done += count
            new = self._done - self._reported
            self._reported = max(self._done, self._reported)
        if new > 0:
            self._on_bytes(new)


class _Watch(BaseSubscriber):
    def __init__(self, progress: Progress, etag: str = "") -> None:
        self._progress = progress
        self._etag = etag

    def on_queued(self, future: Any, **_: object) -> None:
        if self._etag:
            future.meta.provide_object_etag(f'"{self._etag}"')

    def on_progress(self, future: Any, bytes_transferred: int, **_: object) -> None:
        self._progress.add(bytes_transferred)
