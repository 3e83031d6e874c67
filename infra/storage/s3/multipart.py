"""Multipart uploads: several parts at once, and all again if the store loses the upload."""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol, TypeAlias, TypeVar

from infra.storage.base import ObjectInfo, ObjectNotFound
from infra.storage.parts import PART, THREADS, Part, part_length, plan_parts, run_all
from infra.storage.s3.bucket import Bucket
from infra.storage.s3.checksums import Checksum
from infra.storage.s3.errors import ErrorResponse, NoResponse
from nanochat_core.errors import StoreError

ROUNDS = 3  # tries of a whole upload that the store loses
_FORGOTTEN = {"NoSuchUpload", "InvalidPart", "InvalidPartOrder"}
_T = TypeVar("_T")
# (upload, part, checksum) -> the part's entry in the request that completes the upload
Send: TypeAlias = Callable[[str, Part, Checksum], Mapping[str, Any]]


class RetryPart(Protocol):
    """A runner of operations with retries. Raises StoreError."""

    def __call__(
        self, what: str, operation: Callable[[], _T], *, stop: threading.Event | None = None
    ) -> _T:
        """Run `operation`; `what` names it in errors, `stop` ends the wait for another try."""
        ...


class _Forgotten(Exception):
    """An upload that the store no longer knows, or assembled wrongly."""


class Uploads:
    """Multipart uploads of one bucket."""

    def __init__(self, bucket: Bucket, pool: Executor, *, retry: RetryPart) -> None:
        self._bucket = bucket
        self._pool = pool
        self._retry = retry

    def send(self, key: str, size: int, send: Send) -> None:
        """Write an object of `size` bytes in parts that `send` writes. Raises StoreError."""
        for left in reversed(range(ROUNDS)):
            # The last round uses the checksum of small bodies, in case the other one is the cause.
            checksum = self._bucket.checksum_of_parts if left else self._bucket.checksum
            try:
                self._send_once(key, size, send, checksum)
            except _Forgotten as error:
                if not left:
                    raise StoreError(
                        f"store {self._bucket.url} cannot put {key} together: {error}",
                        hint="`nanochat doctor --probe-store` tries what the store can do",
                    ) from error
            else:
                return

    def _send_once(self, key: str, size: int, send: Send, checksum: Checksum) -> None:
        parts = plan_parts(size, length=part_length(size))
        # Needed to recognise our own object if the answer to the completion is lost.
        before = self._retry(f"look at {key}", lambda: self._find(key))
        upload, agreed = self._retry(f"put {key}", lambda: self._bucket.begin_upload(key, checksum))
        tags: dict[int, Mapping[str, Any]] = {}

        def work(part: Part, stop: threading.Event) -> None:
            tags[part.index] = self._retry(
                f"put {key}", lambda: send(upload, part, agreed), stop=stop
            )

        try:
            # A part is in memory while it is sent: larger parts, fewer at a time.
            run_all(self._pool, parts, work, at_once=max(1, THREADS * PART // parts[0].length))
            sent = [tags[part.index] for part in parts]
            self._retry(f"put {key}", lambda: self._complete(key, upload, sent, size, before))
        except BaseException as error:
            # The store bills the parts of an upload until it is completed or aborted.
            with contextlib.suppress(NoResponse, ErrorResponse):
                self._bucket.abort_upload(key, upload)
            cause = error.__cause__
            if isinstance(cause, ErrorResponse) and cause.code in _FORGOTTEN:
                raise _Forgotten(str(cause)) from cause
            raise

    def _complete(
        self,
        key: str,
        upload: str,
        sent: Sequence[Mapping[str, Any]],
        size: int,
        before: ObjectInfo | None,
    ) -> None:
        """Complete the upload, unless an earlier try did so and only its answer was lost."""
        try:
            self._bucket.complete_upload(key, upload, sent)
        except (NoResponse, ErrorResponse):
            try:
                found = self._find(key)
            except (NoResponse, ErrorResponse):
                found = None
            # Unchanged since `before`: the completion failed indeed.
            if found is None or found == before or found.size != size:
                raise
        else:
            found = self._find(key)
            if found is None:
                raise NoResponse("it does not show what it has just put together")
            if found.size != size:
                raise ErrorResponse("InvalidPart", message=f"{found.size} bytes instead of {size}")

    def _find(self, key: str) -> ObjectInfo | None:
        try:
            return self._bucket.head(key)
        except ObjectNotFound:
            return None
