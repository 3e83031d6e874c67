"""A store in a bucket (s3://bucket/prefix): AWS, or any server that speaks S3.

Every verb is retried as a whole until it has an answer, within the limits of `RetryPolicy`. Large
objects are transferred in parts, several at once.
"""

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from infra.storage.base import (
    MAX_RECORD,
    ObjectInfo,
    ObjectNotFound,
    OnBytes,
    StoreUnavailable,
    VersionedObject,
    check_key,
    check_size,
    ignore_bytes,
)
from infra.storage.files import replacing, writing_to
from infra.storage.s3 import conditional
from infra.storage.s3.bucket import Bucket
from infra.storage.s3.conditional import TRIALS
from infra.storage.s3.errors import (
    NOT_S3,
    REDIRECT,
    Changed,
    ErrorResponse,
    NoResponse,
    RetryPolicy,
    explain,
    with_retries,
)
from infra.storage.s3.settings import Settings, read_settings
from infra.storage.s3.transfers import LOST_UPLOAD, PART, ROUNDS, Progress, Transfers
from nanochat_core.errors import StoreError

_FIRST_CONTACT = 3  # tries of a store that never answered: its address may be wrong
# Temporary once a request was accepted: then a proxy or gateway on the way is the cause.
_TROUBLED = {"SignatureDoesNotMatch", NOT_S3, REDIRECT}
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_T = TypeVar("_T")


class S3Store:
    """Objects under a prefix of a bucket. Nothing is contacted before the first verb."""

    def __init__(
        self,
        url: str,
        *,
        settings: Settings | None = None,  # None: the environment's
        retry_policy: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
    ) -> None:
        name, prefix = parse_url(url)
        self.settings = settings or read_settings()
        self.bucket = Bucket(name, prefix=prefix, settings=self.settings)
        self._retry_policy = retry_policy
        self._trying_conditions = threading.Lock()
        self.faults: Sequence[str] | None = None  # of its conditional writes; None: not probed yet

    @functools.cached_property
    def _transfers(self) -> Transfers:
        return Transfers(self.bucket, self._retry_policy)

    @property
    def url(self) -> str:
        """See Store."""
        return self.bucket.url

    def put(self, key: str, data: bytes) -> None:
        """See Store."""
        self._retry(f"put {key}", lambda: self.bucket.put(key, data))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See Store."""
        check_key(key)  # before the probe, which contacts the store
        self.check_conditions()
        return self._retry(f"put {key}", lambda: conditional.put_if_absent(self.bucket, key, data))

    def put_if_same(self, key: str, data: bytes, *, version: str) -> bool:
        """See Store."""
        check_key(key)
        self.check_conditions()
        return self._retry(
            f"put {key}", lambda: conditional.put_if_same(self.bucket, key, data, version)
        )

    def get(self, key: str, *, size: int | None = None) -> bytes:
        """See Store."""
        limit = MAX_RECORD if size is None else size
        return self._retry(f"get {key}", lambda: self.bucket.get(key, limit=limit))

    def get_stored(self, key: str) -> VersionedObject:
        """See Store."""
        return self._retry(f"get {key}", lambda: self.bucket.get_stored(key))

    def head(self, key: str) -> ObjectInfo:
        """See Store."""
        return self._retry(f"look at {key}", lambda: self.bucket.head(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See Store."""
        last: str | None = None
        token: str | None = None
        while True:
            page = self._retry(
                f"list {prefix}*",
                functools.partial(self.bucket.list_page, prefix, after=last, token=token),
            )
            for entry in page.entries:
                if last is not None and entry.key <= last:
                    raise StoreError(
                        f"store {self.url} lists '{entry.key}' after '{last}'",
                        hint="use a store that lists keys in order",
                    )
                last = entry.key
                if entry.key and not entry.key.endswith("/"):  # a console's empty "folder"
                    yield entry
            token = page.token
            # Some servers end after 1000 keys without saying that there are more: after a page of
            # a round number of keys one more request is made.
            if not page.has_more and (not page.entries or len(page.entries) % 50):
                return
            if token is None and not page.entries:
                raise StoreError(
                    f"store {self.url} says that there is more after '{last}' and does not send it",
                    hint="use a store that lists keys in order",
                )

    def delete(self, key: str) -> None:
        """See Store."""
        self._retry(f"delete {key}", lambda: self.bucket.delete(key))

    def upload(self, key: str, path: Path, *, on_bytes: OnBytes = ignore_bytes) -> None:
        """See Store."""
        check_key(key)
        if path.stat().st_size <= PART:
            data = path.read_bytes()
            self.put(key, data)
            on_bytes(len(data))
            return
        progress = Progress(on_bytes)
        self._transfer(f"put {key}", lambda: self._transfers.upload(key, path, progress))

    def fetch(self, key: str, path: Path, *, size: int, on_bytes: OnBytes = ignore_bytes) -> None:
        """See Store."""
        source, progress = f"{self.url}/{check_key(key)}", Progress(on_bytes)
        for _ in range(ROUNDS):
            found = self.head(key)
            check_size(source, found.size, size)
            with contextlib.suppress(Changed), writing_to(path), replacing(path) as temporary:
                if found.size <= PART:
                    temporary.write_bytes(self.get(key, size=size))
                    progress.begin().add(temporary.stat().st_size)
                else:
                    download = functools.partial(
                        self._transfers.download, key, temporary, found, progress
                    )
                    self._transfer(f"get {key}", download)
                return
        raise StoreUnavailable(
            f"{source} was replaced {ROUNDS} times while it was fetched",
            hint="run the command again when no other process writes it",
        )

    def abort_stale_uploads(self, *, older_than: float) -> int:
        """See Store."""
        try:
            uploads = self.list_unfinished()
        except StoreError as error:
            # 501: the store does not implement the listing of uploads.
            if not (isinstance(error.__cause__, ErrorResponse) and error.__cause__.status == 501):
                raise
            uploads = ()  # the store cannot list them
        old = [(key, upload) for key, upload, age in uploads if age > older_than]
        for key, upload in old:
            self._retry(
                f"drop an upload of {key}",
                functools.partial(self.bucket.abort_upload, key, upload),
            )
        trials = [entry.key for entry in self.list(f"{TRIALS}/")]
        return len(old) + sum(self._remove_old(key, older_than) for key in trials)

    def list_unfinished(self) -> Sequence[tuple[str, str, float]]:
        """Return key, id and age of unfinished multipart uploads."""
        return self._retry("list unfinished uploads", self.bucket.list_uploads)

    def check_conditions(self) -> None:
        """See Store. AWS is known to have them."""
        with self._trying_conditions:
            if self.faults is None:
                retry = functools.partial(self._retry, "probe the store")
                is_aws = self.bucket.is_aws
                self.faults = () if is_aws else conditional.find_faults(self.bucket, retry=retry)
        if self.faults:
            raise StoreError(
                f"store {self.url} has no atomic conditional writes: it "
                + " and ".join(self.faults),
                hint="use a server whose PUT applies If-None-Match and If-Match atomically (AWS, "
                "Cloudflare R2, MinIO, Ceph 20; not Ceph 18), or a directory; reading works here: "
                "`ls`, `fetch`",
            )

    def _remove_old(self, key: str, older_than: float) -> bool:
        try:
            is_old = self.get_stored(key).age > older_than
        except ObjectNotFound:
            return False
        if is_old:
            self.delete(key)
        return is_old

    def _transfer(self, what: str, operation: Callable[[], None]) -> None:
        """Run a transfer, whose requests have retries of their own. Raises StoreError."""

        def is_lost(refused: ErrorResponse) -> bool:
            return refused.code in LOST_UPLOAD or self._is_troubled(refused)

        limits = replace(self._retry_policy, tries=ROUNDS)
        self._retry(what, operation, retry_policy=lambda: limits, is_passing=is_lost)

    def _retry(
        self,
        what: str,
        operation: Callable[[], _T],
        *,
        retry_policy: Callable[[], RetryPolicy] | None = None,
        is_passing: Callable[[ErrorResponse], bool] | None = None,
    ) -> _T:
        """Run an operation with retries. Raises StoreError."""
        try:
            return with_retries(
                operation,
                retry_policy=retry_policy or self._limits,
                is_passing=is_passing or self._is_passing,
            )
        except (NoResponse, ErrorResponse) as error:
            raise explain(
                error,
                where=self.bucket.where,
                what=what,
                was_accepted=self.bucket.has_accepted,
            ) from error

    def _limits(self) -> RetryPolicy:
        # Called after each failure: a wrong address fails soon, an outage later gets all tries.
        if self.bucket.has_answered:
            return self._retry_policy
        return replace(self._retry_policy, tries=min(self._retry_policy.tries, _FIRST_CONTACT))

    def _is_passing(self, refused: ErrorResponse) -> bool:
        return refused.is_passing or self._is_troubled(refused)

    def _is_troubled(self, refused: ErrorResponse) -> bool:
        return self.bucket.has_accepted and refused.code in _TROUBLED


def parse_url(url: str) -> tuple[str, str]:
    """Return bucket and prefix of s3://bucket/prefix. Raises StoreError, without any secret."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise StoreError(
            "a store's URL cannot hold credentials",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        )
    name, prefix = parts.netloc, parts.path.strip("/")
    if parts.scheme != "s3" or not name or parts.query or parts.fragment:
        raise StoreError(
            f"unsupported store URL '{url}'", hint="a bucket is given like s3://bucket/prefix"
        )
    if not _BUCKET.fullmatch(name):
        raise StoreError(
            f"unsupported store URL '{url}': no bucket can be called '{name}'",
            hint="its name has 3 to 63 lower-case letters, digits and inner dots and hyphens",
        )
    return name, check_key(prefix) if prefix else ""
