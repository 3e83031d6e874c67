"""Single requests to a bucket, without retries.

Every failure is raised as ObjectNotFound, ErrorResponse or NoResponse. Only sizes, ranges and
versions are compared here: the caller of a fetch checks the digest of the bytes.
"""

import contextlib
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from infra.storage.base import (
    MAX_RECORD,
    ObjectInfo,
    ObjectNotFound,
    VersionedObject,
    check_key,
    check_size,
)
from infra.storage.s3.client import NO_CLIENT, READ_SECONDS, make_client, translating
from infra.storage.s3.errors import (
    NOT_S3,
    REDIRECT,
    ErrorResponse,
    Page,
    Where,
    field_of,
    find_date,
    version_of,
)
from infra.storage.s3.gateways import check_listing
from infra.storage.s3.settings import Settings, client_hint, endpoint_setting
from nanochat_core.errors import StoreError


class Bucket:
    """Objects under a prefix of a bucket. Connects when first used."""

    def __init__(self, name: str, *, prefix: str, settings: Settings) -> None:
        self.name = name
        self.prefix = f"{prefix}/" if prefix else ""
        self.url = f"s3://{name}/{prefix}".rstrip("/")
        self.has_accepted = False  # accepted a request: endpoint and credentials are right
        self.has_answered = False  # answered at all, if only with an error
        self._settings = settings
        self._lock = threading.Lock()
        self._made: Any = None  # the client, once it is needed
        self._is_aws = False

    @property
    def is_aws(self) -> bool:
        """True if the endpoint is Amazon's own."""
        self.client()
        return self._is_aws

    @property
    def where(self) -> Where:
        """Return the store's address for error messages."""
        client = self.client()
        return Where(
            url=self.url,
            bucket=self.name,
            endpoint=client.meta.endpoint_url,
            setting=endpoint_setting(),
            is_aws=self._is_aws,
        )

    def create(self) -> None:
        """Create the bucket itself, unless it is there and ours."""
        try:
            self._ask("create_bucket")
        except ErrorResponse as error:  # Outside us-east-1 this is the answer for an own bucket.
            if error.code != "BucketAlreadyOwnedByYou":
                raise

    def put(self, key: str, data: bytes, *, condition: Mapping[str, str] = {}) -> None:
        """Write an object. `condition` holds further arguments of the request."""
        self._ask("put_object", key, {"Body": data, **condition})

    def get(self, key: str, *, limit: int = MAX_RECORD) -> bytes:
        """Return all bytes of an object. Raises BadObject if they are more than `limit`."""
        with self._reading(key) as answer:
            return self._read(key, answer, limit)

    def get_stored(self, key: str) -> VersionedObject:
        """Return all bytes of an object, its version, and its age by the store's clock."""
        with self._reading(key) as answer:
            data = self._read(key, answer, MAX_RECORD)
            now = find_date(answer["ResponseMetadata"]["HTTPHeaders"])
            if now is None:
                raise ErrorResponse("NoDate", message="its answers have no Date header")
            # Both dates are whole seconds, so the difference may be just below zero.
            age = max(0.0, now - field_of(answer, "LastModified").timestamp())
            return VersionedObject(data=data, version=version_of(answer), age=age)

    def head(self, key: str) -> ObjectInfo:
        """Return size, version and time of an object."""
        try:
            answer = self._ask("head_object", key)
        except ErrorResponse as error:
            if error.is_passing or not error.code.isdigit():
                raise
            # An error of HEAD has no body, so no code: a GET of the same key explains it.
            with self._reading(key) as answer:
                pass
        return ObjectInfo(
            key=key,
            size=field_of(answer, "ContentLength"),
            etag=version_of(answer),
            modified=field_of(answer, "LastModified").timestamp(),
        )

    def list_page(self, prefix: str, *, after: str | None, token: str | None) -> Page:
        """Return one page of the objects whose key starts with `prefix`, in the order of keys."""
        arguments = {"Prefix": self.prefix + prefix}
        # Some stores give no token, but they all continue after a key.
        if token:
            arguments["ContinuationToken"] = token
        elif after:
            arguments["StartAfter"] = self.prefix + after
        answer = self._ask("list_objects_v2", None, arguments)
        # A gateway's page or another bucket's listing would pass for an empty store.
        check_listing(self.name, answer.get("Name"))
        entries = [
            ObjectInfo(
                key=field_of(item, "Key").removeprefix(self.prefix),
                size=field_of(item, "Size"),
                modified=field_of(item, "LastModified").timestamp(),
                etag=version_of(item),
            )
            for item in answer.get("Contents", ())
        ]
        more = answer.get("IsTruncated", False)
        token = answer.get("NextContinuationToken") if more else None
        return Page(entries=entries, has_more=more, token=token)

    def delete(self, key: str) -> None:
        """Remove an object."""
        with contextlib.suppress(ObjectNotFound):
            self._ask("delete_object", key)

    def address(self, key: str) -> tuple[str, str]:
        """Return the bucket's name and the whole key of an object."""
        return self.name, self.prefix + check_key(key)

    def has_upload(self, key: str, size: int, tag: str) -> bool:
        """Return whether the object has this size and is of the upload with this tag."""
        try:
            found = self._ask("head_object", key)
        except ErrorResponse as error:
            if error.status != 404:
                raise
            return False
        return found.get("ContentLength") == size and found.get("Metadata", {}).get("upload") == tag

    def abort_upload(self, key: str, upload: str) -> None:
        """Abort a multipart upload and drop its parts."""
        with contextlib.suppress(ObjectNotFound):
            self._ask("abort_multipart_upload", key, {"UploadId": upload})

    def list_uploads(self) -> Sequence[tuple[str, str, float]]:
        """Return key, id and age of the first thousand unfinished uploads under the prefix."""
        answer = self._ask("list_multipart_uploads", None, {"Prefix": self.prefix})
        now = find_date(answer["ResponseMetadata"]["HTTPHeaders"]) or 0.0
        return [
            (
                field_of(item, "Key").removeprefix(self.prefix),
                field_of(item, "UploadId"),
                now - field_of(item, "Initiated").timestamp(),
            )
            for item in answer.get("Uploads", ())
            if field_of(item, "Key").startswith(self.prefix)
        ]

    def _read(self, key: str, answer: Any, limit: int) -> bytes:
        """Return all bytes of an answer; read none if its declared length exceeds `limit`."""
        where = f"{self.url}/{key}"
        check_size(where, answer.get("ContentLength", 0), limit)
        data: bytes = answer["Body"].read(limit + 1)
        check_size(where, len(data), limit)
        if len(data) <= limit:
            # Botocore compares the length with Content-Length only when it reads past the end.
            answer["Body"].read(1)
        return data

    @contextlib.contextmanager
    def _reading(self, key: str) -> Generator[Any]:
        """Send a GET whose body is read in the block; an unread rest closes the connection."""
        answer = self._ask("get_object", key)
        with contextlib.closing(answer["Body"]), translating():
            yield answer

    def _ask(self, verb: str, key: str | None = None, what: Mapping[str, Any] = {}) -> Any:
        """Send one request. Raises ObjectNotFound, ErrorResponse and NoResponse."""
        arguments = what if key is None else {"Key": self.prefix + check_key(key), **what}
        call = getattr(self.client(), verb)
        try:
            with translating():
                answer = call(Bucket=self.name, **arguments)
        except ErrorResponse as error:
            self.has_answered |= error.status > 0
            # An answer to an authorised request, unlike any other refusal.
            self.has_accepted |= error.code == "NoSuchKey"
            if key is not None and self._is_missing(verb, error):
                raise ObjectNotFound(key) from None
            raise
        self.has_answered = self.has_accepted = True
        return answer

    def _is_missing(self, verb: str, error: ErrorResponse) -> bool:
        """Return whether the store says that the bucket exists and has no such object."""
        if error.code == "NoSuchKey":
            return True
        # A HEAD's 404 has no body and may be a proxy's: `head` asks again with a GET.
        if error.status != 404 or error.code not in ("404", "NotFound") or verb == "head_object":
            return False
        try:  # some stores do not say what is missing
            self._ask("head_bucket")
        except ErrorResponse as refused:
            # The bucket existed before, so this 404 may be a proxy's: not proof of absence.
            if refused.status == 404 and self.has_accepted:
                raise ErrorResponse(NOT_S3, status=404, message="a bare 404") from None
            if refused.status == 404:
                raise ErrorResponse("NoSuchBucket", status=404) from None
            if refused.is_passing or refused.code in (NOT_S3, REDIRECT):
                raise
        return True

    def client(self) -> Any:
        """Return the client, made when first used. Raises StoreError for settings not valid."""
        with self._lock:
            if self._made is None:
                try:
                    self._made, self._is_aws = make_client(self._settings, seconds=READ_SECONDS)
                except NO_CLIENT as error:
                    raise StoreError(
                        f"store {self.url} cannot be opened: {error}",
                        hint=client_hint(),
                    ) from error
            return self._made
