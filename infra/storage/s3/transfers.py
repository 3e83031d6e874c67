"""Transfers of large files by boto3's transfer manager: in parts, several at once.

Each part is sent or fetched again by the policy of all requests. The caller begins again if the
store lost the upload, or if the object was replaced meanwhile.
"""

import threading
import uuid
from pathlib import Path
from typing import Any

from s3transfer.manager import (  # pyright: ignore[reportMissingTypeStubs]
    TransferConfig,
    TransferManager,
)
from s3transfer.subscribers import BaseSubscriber  # pyright: ignore[reportMissingTypeStubs]

from infra.storage.base import ObjectInfo, OnBytes
from infra.storage.s3.bucket import Bucket
from infra.storage.s3.client import LOST, THREADS, translating
from infra.storage.s3.errors import (
    Changed,
    ErrorResponse,
    NoResponse,
    RetryPolicy,
    parse_range,
    version_of,
    with_retries,
)
from nanochat_core.errors import StoreError

PART = 16 << 20  # bytes
ROUNDS = 3  # tries of a whole transfer
LOST_UPLOAD = {"NoSuchUpload", "InvalidPart", "InvalidPartOrder"}
_VERBS = ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "GetObject")


class Transfers:
    """Uploads and downloads of one bucket, which share their threads."""

    def __init__(self, bucket: Bucket, retry_policy: RetryPolicy) -> None:
        self._bucket = bucket
        self._retry_policy = retry_policy
        self._lock = threading.Lock()
        self._made: Any = None

    def upload(self, key: str, path: Path, progress: "Progress") -> None:
        """Write a file as an object. Raises ErrorResponse and NoResponse."""
        size, tag = path.stat().st_size, uuid.uuid4().hex
        extra = {"Metadata": {"upload": tag}}
        transfer = self._manager().upload(
            str(path), *self._bucket.address(key), extra, [_Watch(progress.begin())]
        )
        try:
            with translating():
                transfer.result()
        except ErrorResponse as error:
            # The upload is also unknown if it was completed and only the answer was lost.
            if error.code != "NoSuchUpload" or not self._has_upload(key, size, tag):
                raise
            return
        if not self._has_upload(key, size, tag):
            raise ErrorResponse("InvalidPart", message=f"it does not show the {size} bytes sent")

    def download(self, key: str, path: Path, found: ObjectInfo, progress: "Progress") -> None:
        """Write an object to a file. Raises Changed, ErrorResponse, NoResponse and OSError."""
        transfer = self._manager().download(
            *self._bucket.address(key), str(path), {}, [_Watch(progress.begin(), etag=found.etag)]
        )
        with translating():
            transfer.result()
        if path.stat().st_size != found.size:
            raise Changed

    def _has_upload(self, key: str, size: int, tag: str) -> bool:
        return with_retries(
            lambda: self._bucket.has_upload(key, size, tag),
            retry_policy=lambda: self._retry_policy,
            is_passing=lambda refused: refused.is_passing,
        )

    def _manager(self) -> Any:
        with self._lock:
            if self._made is None:
                client: Any = self._bucket.client()
                for verb in _VERBS:
                    event = f"needs-retry.s3.{verb}"
                    client.meta.events.register(event, self._wait_before_retry, f"transfers-{verb}")
                config = TransferConfig(
                    multipart_threshold=PART,
                    multipart_chunksize=PART,
                    max_request_concurrency=THREADS,
                    max_io_queue_size=4 * THREADS,
                    num_download_attempts=self._retry_policy.tries,  # of a body that is cut off
                )
                self._made = TransferManager(client, config)
            return self._made

    def _wait_before_retry(
        self, response: Any, attempts: int, caught_exception: Any, request_dict: Any, **_: object
    ) -> float | None:
        """Handle botocore's event `needs-retry`: seconds to wait; None means no other try."""
        headers = request_dict["headers"]
        parsed: Any = response[1] if response else {}
        if request_dict["method"] == "GET" and "Range" not in headers:
            return None  # a small object: `S3Store` repeats it
        may_retry = attempts < self._retry_policy.tries
        if caught_exception is not None:
            passing = isinstance(caught_exception, LOST)
        elif "Error" in parsed:
            status = parsed["ResponseMetadata"]["HTTPStatusCode"]
            passing = ErrorResponse(parsed["Error"].get("Code") or "", status=status).is_passing
        else:
            passing = "Range" in headers and not _is_whole_part(parsed, headers)
            if passing:
                parsed["Body"].close()
                if not may_retry:
                    raise NoResponse("the store sends less of a part than it says")
        return self._retry_policy.wait(attempts) if passing and may_retry else None


def _is_whole_part(answer: Any, headers: Any) -> bool:
    """Return whether an answer has the length of its range. Raises Changed and StoreError."""
    if "ContentRange" not in answer:
        answer["Body"].close()
        raise StoreError(
            "the store answers a range request with the whole object",
            hint="use a store that reads ranges; a proxy before it may ignore them",
        )
    if headers.get("If-Match", "").strip('"') not in ("", version_of(answer)):
        answer["Body"].close()
        raise Changed
    first, last, _ = parse_range(answer["ContentRange"])
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
