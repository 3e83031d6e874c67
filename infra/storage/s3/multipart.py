"""Objects put together from parts: sent several at once, all again when the store forgets them."""

import contextlib
import threading
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol, TypeAlias, TypeVar

from infra.storage.base import ObjectNotFound
from infra.storage.parts import PART, THREADS, Part, part_length, plan_parts, run_all
from infra.storage.s3.bucket import Bucket
from infra.storage.s3.checksums import Checksum
from infra.storage.s3.errors import ErrorResponse, NoResponse, ObjectHead
from nanochat_core.errors import StoreError

ROUNDS = 3  # for an upload that the store forgets
_FORGOTTEN = {"NoSuchUpload", "InvalidPart", "InvalidPartOrder"}
_T = TypeVar("_T")
_BODY = b"whole"  # of a trial
_PART = Part(index=0, start=0, length=len(_BODY))
# (upload, part, checksum) -> what the store must be told of the part at the end
Send: TypeAlias = Callable[[str, Part, Checksum], Mapping[str, Any]]


class PersistPart(Protocol):
    """Does an operation until it has an answer. Raises StoreError."""

    def __call__(
        self, what: str, operation: Callable[[], _T], *, stop: threading.Event | None = None
    ) -> _T:
        """`what` is for errors; `stop` ends waiting for another try."""
        ...


class _Forgotten(Exception):
    """The store does not know the upload any more, or made something else of it."""


class Uploads:
    """Writes objects in parts."""

    def __init__(self, bucket: Bucket, pool: Executor, *, persist: PersistPart) -> None:
        self._bucket = bucket
        self._pool = pool
        self._persist = persist

    def send(self, key: str, size: int, send: Send, *, checksum: Checksum) -> None:
        """Make an object of `size` bytes of parts that `send` writes. Raises StoreError.

        The last round does with the checksum that small bodies have, in case the other is to blame.
        """
        for left in reversed(range(ROUNDS)):
            try:
                self._send_once(key, size, send, checksum if left else self._bucket.checksum)
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
        before = self._persist(f"look at {key}", lambda: self._find(key))
        upload = self._persist(f"put {key}", lambda: self._bucket.begin_upload(key, checksum))
        tags: dict[int, Mapping[str, Any]] = {}

        def work(part: Part, stop: threading.Event) -> None:
            tags[part.index] = self._persist(
                f"put {key}", lambda: send(upload, part, checksum), stop=stop
            )

        try:
            # A part is in memory while it is sent.
            run_all(self._pool, parts, work, at_once=max(1, THREADS * PART // parts[0].length))
            told = [tags[part.index] for part in parts]
            self._persist(f"put {key}", lambda: self._complete(key, upload, told, size, before))
        except BaseException as error:
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
        told: Sequence[Mapping[str, Any]],
        size: int,
        before: ObjectHead | None,
    ) -> None:
        """Put the parts together; they may be already, when only the answer was lost."""
        try:
            self._bucket.complete_upload(key, upload, told)
        except (NoResponse, ErrorResponse):
            try:
                found = self._find(key)
            except (NoResponse, ErrorResponse):
                found = None
            if found is None or found == before or found.size != size:
                raise
        else:
            found = self._find(key)
            if found is None:
                raise NoResponse("it does not show what it has just put together")
            if found.size != size:
                raise ErrorResponse("InvalidPart", message=f"{found.size} bytes instead of {size}")

    def _find(self, key: str) -> ObjectHead | None:
        try:
            return self._bucket.head(key)
        except ObjectNotFound:
            return None


def checks_parts(
    bucket: Bucket,
    kind: Checksum,
    *,
    under: str,
    persist: Callable[[Callable[[], Any]], Any],
) -> bool:
    """Whether the store takes an object of parts with this checksum and refuses a damaged part.

    `persist` does one request, again if need be.
    """
    key = f"{under}/{uuid.uuid4().hex}/checksum"

    def ask(request: Callable[[], _T], *, no: Collection[str] = ()) -> _T | None:
        """What the store answers; None: it cannot do that, or gives one of the codes `no`."""

        def once() -> _T | None:
            try:
                return request()
            except ObjectNotFound:
                return None
            except ErrorResponse as error:
                if error.is_passing and error.code not in no:
                    raise
                return None

        return persist(once)

    upload = ask(lambda: bucket.begin_upload(key, kind))
    if upload is None:
        return False
    damaged = ask(
        lambda: bucket.put_part(key, upload, _PART, b"other", kind, claim=_BODY),
        no=("BadDigest",),
    )
    told = ask(lambda: bucket.put_part(key, upload, _PART, _BODY, kind))
    if damaged is not None or told is None:
        ask(lambda: bucket.abort_upload(key, upload))
        return False
    try:
        ask(lambda: bucket.complete_upload(key, upload, [told]))
        is_whole = ask(lambda: bucket.get(key)) == _BODY
        if not is_whole:
            ask(lambda: bucket.abort_upload(key, upload))
        return is_whole
    finally:
        ask(lambda: bucket.delete(key))
