"""A store in a bucket (s3://bucket/prefix): AWS, or any server that speaks S3.

Every verb is retried as a whole until it has an answer, within the limits of `RetryPolicy`. That is
safe because each is either idempotent or decided by a condition whose outcome it reads back.
"""

import contextlib
import functools
import re
import threading
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from email.utils import parsedate_to_datetime
from math import inf
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from botocore.exceptions import (  # pyright: ignore[reportMissingTypeStubs]
    BotoCoreError,
    ClientError,
)
from s3transfer.exceptions import (  # pyright: ignore[reportMissingTypeStubs]
    S3DownloadFailedError,
)

from infra.retry import TRIES, NoAnswer, RetryPolicy, until_answered
from infra.storage.base import (
    MAX_RECORD,
    ObjectInfo,
    ObjectNotFound,
    OnBytes,
    VersionedObject,
    check_key,
    check_size,
    ignore_bytes,
)
from infra.storage.files import replacing, writing_to
from infra.storage.s3.client import PART, Progress, is_aws, make_client, make_manager
from infra.storage.s3.errors import (
    FAILURES,
    LOST_UPLOAD,
    NoResponse,
    Replaced,
    code_of,
    endpoint_setting,
    explain,
    is_lost,
    is_transient,
    status_of,
)
from infra.storage.s3.probe import TRIALS, find_faults
from nanochat_core.errors import StoreError

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ETAG_VERBS = {"put_object", "get_object", "head_object"}
_ORDER = "use a store that lists all keys, in order"
_POLICY = RetryPolicy(tries=8, first_wait=0.2, longest_wait=15.0, deadline=120.0)
_T = TypeVar("_T")


class S3Store:
    """Objects under a prefix of a bucket. Nothing is contacted before the first verb."""

    def __init__(self, url: str, *, retry_policy: RetryPolicy = _POLICY) -> None:
        self.bucket, prefix = _parse_url(url)
        self.prefix = f"{prefix}/" if prefix else ""
        self._retry_policy = retry_policy
        self._trying_conditions = threading.Lock()
        self.has_accepted = False  # accepted a request: endpoint and credentials are right
        self.faults: Sequence[str] | None = None  # of its conditional writes; None: not tried yet

    @property
    def url(self) -> str:
        """See Store."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    @functools.cached_property
    def client(self) -> Any:
        """Return botocore's client. Raises StoreError if its settings are not valid."""
        try:
            return make_client()
        except (BotoCoreError, ValueError) as error:
            hint = f"check {endpoint_setting()}, which begins with http:// or https://, the other "
            hint += "AWS_... variables, NANOCHAT_S3_ADDRESSING and ~/.aws/config"
            raise StoreError(f"store {self.url} cannot be opened: {error}", hint=hint) from error

    @functools.cached_property
    def _transfers(self) -> Any:
        return make_manager(self.client, self._repeat, int(self._retry_policy.tries))

    def create_bucket(self) -> None:
        """Create the bucket itself, unless it is there and ours; compose.yaml calls it."""
        try:
            self.request("create_bucket")
        except ClientError as error:  # Outside us-east-1 this is the answer for an own bucket.
            if code_of(error) != "BucketAlreadyOwnedByYou":
                raise

    def put(self, key: str, data: bytes) -> None:
        """See Store."""
        self._retry(f"put {key}", lambda: self.request("put_object", key, Body=data))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See Store."""
        check_key(key)  # before the trial, which contacts the store
        self.check_conditions()
        return self._write_if(key, data)

    def put_if_same(self, key: str, data: bytes, *, version: str) -> bool:
        """See Store."""
        check_key(key)
        self.check_conditions()
        return self._write_if(key, data, version)

    def get(self, key: str, *, size: int | None = None) -> bytes:
        """See Store."""
        limit = MAX_RECORD if size is None else size
        return self._retry(f"get {key}", lambda: self._read(key, limit)[0])

    def get_stored(self, key: str) -> VersionedObject:
        """See Store."""
        data, answer = self._retry(f"get {key}", lambda: self._read(key, MAX_RECORD))
        if (date := answer["ResponseMetadata"]["HTTPHeaders"].get("date")) is None:
            raise StoreError(f"store {self.url} sends no Date header", hint="use another store")
        now = parsedate_to_datetime(date)
        # Both dates are whole seconds, so the difference may be just below zero.
        age = max(0.0, (now - answer["LastModified"]).total_seconds())
        return VersionedObject(data=data, version=answer["ETag"].strip('"'), age=age)

    def head(self, key: str) -> ObjectInfo:
        """See Store."""
        answer: Any = self._retry(f"look at {key}", lambda: self._head(key))
        return _info(key, answer["ContentLength"], answer)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See Store."""
        last: str | None = None
        more: dict[str, str] = {}
        while True:
            where = {"Prefix": self.prefix + prefix, **more}
            ask = functools.partial(self.request, "list_objects_v2", **where)
            page: Any = self._retry(f"list {prefix}*", ask)
            items = page.get("Contents", ())
            for item in items:
                key = item["Key"].removeprefix(self.prefix)
                if last is not None and key <= last:
                    raise StoreError(f"store {self.url} lists '{key}' after '{last}'", hint=_ORDER)
                last = key
                if key and not key.endswith("/"):  # a console's empty "folder"
                    yield _info(key, item["Size"], item)
            # Some servers end after 1000 keys without saying that there are more: after a page of
            # a round number of keys one more request is made.
            if not page.get("IsTruncated") and (not items or len(items) % 50):
                return
            token = page.get("NextContinuationToken")
            if token is None and not items:
                error = f"store {self.url} says that there is more after '{last}' and sends nothing"
                raise StoreError(error, hint=_ORDER)
            # Some stores give no token, but they all continue after a key.
            more = {"ContinuationToken": token} if token else {"StartAfter": f"{self.prefix}{last}"}

    def delete(self, key: str) -> None:
        """See Store."""
        with contextlib.suppress(ObjectNotFound):
            self._retry(f"delete {key}", lambda: self.request("delete_object", key))

    def upload(self, key: str, path: Path, *, on_bytes: OnBytes = ignore_bytes) -> None:
        """See Store."""
        name = self.prefix + check_key(key)
        if (size := path.stat().st_size) <= PART:
            self.put(key, path.read_bytes())
            on_bytes(size)
            return
        tag = uuid.uuid4().hex

        def send() -> None:
            code = ""
            try:
                extra, watch = {"Metadata": {"upload": tag}}, [Progress(on_bytes)]
                self._transfers.upload(str(path), self.bucket, name, extra, watch).result()
            except ClientError as error:
                # The upload is also unknown if it was completed and only the answer was lost.
                if (code := code_of(error)) not in LOST_UPLOAD:
                    raise
            with contextlib.suppress(ObjectNotFound):
                found: Any = self._repeat(lambda: self._head(key))
                if (found["ContentLength"], found.get("Metadata", {}).get("upload")) == (size, tag):
                    return
            raise Replaced(f"the store does not show the {size} bytes sent: {code}".rstrip(": "))

        self._transfer(f"put {key}", send)

    def fetch(self, key: str, path: Path, *, size: int, on_bytes: OnBytes = ignore_bytes) -> None:
        """See Store."""
        name = self.prefix + check_key(key)

        def download() -> None:
            found = self.head(key)
            check_size(f"{self.url}/{key}", found.size, size)
            if found.size <= PART:
                temporary.write_bytes(self.get(key, size=size))
                on_bytes(found.size)
                return
            watch = [Progress(on_bytes)]
            with contextlib.suppress(S3DownloadFailedError):  # a part is of another object
                self._transfers.download(self.bucket, name, str(temporary), {}, watch).result()
                if temporary.stat().st_size == found.size:
                    return
            raise Replaced("the object was replaced while it was fetched")

        with writing_to(path), replacing(path) as temporary:
            self._transfer(f"get {key}", download)

    def abort_stale_uploads(self, *, before: float) -> int:
        """See Store."""
        ask = functools.partial(self.request, "list_multipart_uploads", Prefix=self.prefix)
        try:
            answer: Any = self._retry("list unfinished uploads", ask)
        except StoreError as error:
            if status_of(error.__cause__) != 501:
                raise
            answer = {}  # the store cannot list them: a rule of the bucket has to drop them
        removed = 0
        for upload in answer.get("Uploads", ()):  # the first thousand
            name, tag = upload["Key"], upload["UploadId"]
            if name.startswith(self.prefix) and upload["Initiated"].timestamp() < before:
                key = name.removeprefix(self.prefix)
                abort = functools.partial(self.request, "abort_multipart_upload", key, UploadId=tag)
                with contextlib.suppress(ObjectNotFound):
                    self._retry(f"drop an upload of {key}", abort)
                removed += 1
        for entry in [entry for entry in self.list(f"{TRIALS}/") if entry.modified < before]:
            self.delete(entry.key)
            removed += 1
        return removed

    def check_conditions(self) -> None:
        """See Store. AWS is known to have them."""
        with self._trying_conditions:
            if self.faults is None:
                self.faults = () if is_aws(self.client) else find_faults(self, self._write_if)
        if self.faults:
            raise StoreError(
                f"store {self.url} has no atomic conditional writes: it "
                + " and ".join(self.faults),
                hint="use a server whose PUT applies If-None-Match and If-Match atomically (AWS, "
                "Cloudflare R2, MinIO, Ceph 20; not Ceph 18), or a directory; reading works here: "
                "`ls`, `fetch`",
            )

    def request(self, verb: str, key: str | None = None, **arguments: Any) -> Any:
        """Send one request, without retries. Raises ObjectNotFound and FAILURES."""
        if key is not None:
            arguments["Key"] = self.prefix + check_key(key)
        try:
            answer = getattr(self.client, verb)(Bucket=self.bucket, **arguments)
        except ClientError as error:
            if key is None or code_of(error) not in ("NoSuchKey", "NoSuchUpload"):
                raise
            self.has_accepted = True
            raise ObjectNotFound(key) from error
        # A login page would pass for the confirmation of a write, or for an empty store.
        is_page = verb in _ETAG_VERBS and "ETag" not in answer
        if is_page or (verb == "list_objects_v2" and answer.get("Name") != self.bucket):
            if "Body" in answer:
                answer["Body"].close()
            raise NoResponse("the answer is not one of S3")
        self.has_accepted = True
        return answer

    def _write_if(self, key: str, data: bytes, version: str | None = None) -> bool:
        """Write an object if it has this version, or does not exist; return whether it was."""
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": f'"{version}"'}

        def write() -> bool:
            try:
                self.request("put_object", key, Body=data, **condition)
            except ObjectNotFound:  # If-Match
                return False
            except ClientError as error:
                if status_of(error) != 412:
                    raise
                # 412 also follows a lost answer to our own write: then the object has our bytes.
                try:
                    return self._is_ours(key, data)
                except ObjectNotFound:
                    if version is not None:
                        return False
                    raise NoResponse("the object that was in the way is gone") from error
            return True

        return self._retry(f"put {key}", write)

    def _is_ours(self, key: str, data: bytes) -> bool:
        return self._read(key, MAX_RECORD)[0] == data

    def _read(self, key: str, limit: int) -> tuple[bytes, Any]:
        """Return all bytes of an object, and the answer; read none if they exceed `limit`."""
        source, answer = f"{self.url}/{key}", self.request("get_object", key)
        with contextlib.closing(answer["Body"]) as body:
            # Without a length the body might have no end.
            check_size(source, answer.get("ContentLength", limit + 1), limit)
            return body.read(), answer

    def _head(self, key: str) -> Any:
        """Return the answer to a HEAD, or that to a GET without its body."""
        try:
            return self.request("head_object", key)
        except ClientError as error:
            if status_of(error) >= 500:
                raise
            # An error of HEAD has no body, so no code: a GET of the same key explains it.
            answer = self.request("get_object", key)
            answer["Body"].close()
            return answer

    def _retry(self, what: str, operation: Callable[[], _T]) -> _T:
        """Return the result of an operation, which is repeated; raise its last error explained."""
        with self._explaining(what):
            return self._repeat(operation)

    def _transfer(self, what: str, transfer: Callable[[], None]) -> None:
        """Transfer a file; begin again if its upload was lost or its object replaced.

        However long a large file takes: its requests are repeated one by one.
        """
        with self._explaining(what):
            policy = replace(self._retry_policy, tries=TRIES, deadline=inf)
            until_answered(transfer, Replaced, policy=policy)

    @contextlib.contextmanager
    def _explaining(self, what: str) -> Generator[None]:
        """Turn a failure of the block into a StoreError with a hint."""
        try:
            yield
        except FAILURES as error:
            endpoint = self.client.meta.endpoint_url
            raise explain(error, what=what, url=self.url, endpoint=endpoint) from error

    def _repeat(self, operation: Callable[[], _T]) -> _T:
        """Return the result of an operation; repeat it while it fails and may succeed."""

        def check(failure: NoAnswer) -> None:
            error = failure.error
            # A body that is damaged on its way has another signature.
            is_damaged = self.has_accepted and code_of(error) == "SignatureDoesNotMatch"
            is_nowhere = is_lost(error) and not self.has_accepted and failure.tries >= TRIES
            if is_nowhere or not (is_damaged or is_transient(error)):
                raise error

        return until_answered(operation, FAILURES, policy=self._retry_policy, on_failure=check)


def _info(key: str, size: int, answer: Any) -> ObjectInfo:
    return ObjectInfo(key=key, size=size, modified=answer["LastModified"].timestamp())


def _parse_url(url: str) -> tuple[str, str]:
    """Return bucket and prefix of s3://bucket/prefix. Raises StoreError, without any secret."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise StoreError(
            "a store's URL cannot hold credentials",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        )
    if not _BUCKET.fullmatch(parts.netloc) or parts.query or parts.fragment:
        raise StoreError(
            f"unsupported store URL '{url}'",
            hint="a bucket is given like s3://bucket/prefix; its name has 3 to 63 lower-case "
            "letters, digits and inner dots and hyphens",
        )
    prefix = parts.path.strip("/")
    return parts.netloc, check_key(prefix) if prefix else ""
