"""Single requests to a bucket, without retries.

Every failure is raised as ObjectNotFound, ErrorResponse or NoResponse. Only sizes, ranges and
versions are compared here: the caller of a fetch checks the digest of the bytes.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

from infra.storage.base import (
    MAX_RECORD,
    ObjectInfo,
    ObjectNotFound,
    VersionedObject,
    check_key,
    check_size,
)
from infra.storage.parts import Part
from infra.storage.s3.checksums import Checksum, algorithm_of, checksum_of
from infra.storage.s3.client import NO_CLIENT, make_client, translating
from infra.storage.s3.errors import (
    NOT_S3,
    REDIRECT,
    ErrorResponse,
    NoResponse,
    Page,
    Where,
    check_version,
    field_of,
    find_date,
    parse_range,
    pass_on,
    version_of,
)
from infra.storage.s3.gateways import check_listing
from infra.storage.s3.settings import Settings, client_hint, endpoint_setting
from nanochat_core.errors import StoreError

READ_SECONDS = 30  # longest pause between two pieces of an answer
SLOW_SECONDS = 300  # longest wait for the completion of a multipart upload
_CHUNK = 1 << 20  # bytes


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
        self._clients: dict[float, Any] = {}  # by read timeout in seconds
        self._is_aws = False

    @property
    def is_aws(self) -> bool:
        """True if the endpoint is Amazon's own."""
        self._client()
        return self._is_aws

    @property
    def checksum(self) -> Checksum:
        """Return the checksum that is sent with small bodies."""
        # Every server that speaks S3 knows MD5; only AWS is sure to know SHA-256.
        return self._settings.checksum or ("sha256" if self.is_aws else "md5")

    @property
    def checksum_of_parts(self) -> Checksum:
        """Return the checksum of large bodies, if the store knows it: see `begin_upload`."""
        return self.checksum if self._settings.checksum or self.is_aws else "crc32"

    @property
    def where(self) -> Where:
        """Return the store's address for error messages."""
        client = self._client()
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

    def put(
        self,
        key: str,
        data: bytes,
        *,
        condition: Mapping[str, str] = {},
        claim: bytes | None = None,
    ) -> None:
        """Write an object. A probe passes other bytes as `claim`, to send a wrong checksum."""
        checksum = checksum_of(data if claim is None else claim, self.checksum)
        self._ask("put_object", key, {"Body": data, **condition, **checksum})

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

    def read(
        self, key: str, found: ObjectInfo, part: Part, write: Callable[[int, bytes], None]
    ) -> None:
        """Pass a part, or the whole object, to `write`, in pieces with their offsets.

        Raises Changed, and StoreError if the store sends the whole object instead of the part.
        """
        wants_all = part.length == found.size
        with self._reading(key, None if wants_all else part) as answer:
            check_version(answer, found)
            span = (part.start, part.start + part.length - 1, found.size)
            if wants_all:
                check_size(f"{self.url}/{key}", answer.get("ContentLength", 0), found.size)
            elif "ContentRange" not in answer:
                raise StoreError(
                    f"store {self.url} answers a range request with the whole object",
                    hint="use a store that reads ranges; a proxy before it may ignore them",
                )
            elif parse_range(answer["ContentRange"]) != span:
                raise NoResponse(f"the store sent {answer.get('ContentRange')} for {part}")
            pass_on(answer["Body"].iter_chunks(_CHUNK), part.start, part.length, write)

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

    def begin_upload(self, key: str, checksum: Checksum) -> tuple[str, Checksum]:
        """Begin a multipart upload; return its id, and the checksum that its parts are to carry.

        That is `checksum` if the store repeats its name, as one that checks it does. One that
        ignores or refuses it gets the checksum of small bodies.
        """
        begin = functools.partial(self._ask, "create_multipart_upload", key)
        try:
            answer = begin(algorithm_of(checksum))
        except ErrorResponse as error:
            if error.is_passing or checksum == self.checksum:
                raise
            answer = begin(algorithm_of(self.checksum))
        is_known = answer.get("ChecksumAlgorithm") == checksum.upper()
        return field_of(answer, "UploadId"), checksum if is_known else self.checksum

    def put_part(
        self, key: str, upload: str, part: Part, data: bytes, checksum: Checksum
    ) -> Mapping[str, Any]:
        """Upload a part; return its entry for `complete_upload`."""
        number = part.index + 1  # S3 counts parts from 1
        body = {"Body": data, **checksum_of(data, checksum)}
        answer = self._ask("upload_part", key, {"UploadId": upload, "PartNumber": number, **body})
        # An upload announced with a checksum algorithm is completed with the sum of every part.
        names = ("ETag", "ChecksumSHA256", "ChecksumCRC32")
        return {"PartNumber": number, **{name: answer[name] for name in names if name in answer}}

    def complete_upload(self, key: str, upload: str, parts: Iterable[Mapping[str, Any]]) -> None:
        """Complete a multipart upload: the object appears under its key."""
        whole = {"UploadId": upload, "MultipartUpload": {"Parts": list(parts)}}
        self._ask("complete_multipart_upload", key, whole, slow=True)

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
    def _reading(self, key: str, part: Part | None = None) -> Generator[Any]:
        """Send a GET whose body is read in the block; an unread rest closes the connection."""
        answer = self._ask("get_object", key, {"Range": part.span} if part else {})
        with contextlib.closing(answer["Body"]), translating():
            yield answer

    def _ask(
        self,
        verb: str,
        key: str | None = None,
        what: Mapping[str, Any] = {},
        *,
        slow: bool = False,
    ) -> Any:
        """Send one request. Raises ObjectNotFound, ErrorResponse and NoResponse."""
        arguments = what if key is None else {"Key": self.prefix + check_key(key), **what}
        call = getattr(self._client(SLOW_SECONDS if slow else READ_SECONDS), verb)
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

    def _client(self, seconds: float = READ_SECONDS) -> Any:
        with self._lock:
            if seconds not in self._clients:
                try:
                    made = make_client(self._settings, seconds=seconds)
                except NO_CLIENT as error:
                    raise StoreError(
                        f"store {self.url} cannot be opened: {error}",
                        hint=client_hint(),
                    ) from error
                self._clients[seconds], self._is_aws = made
            return self._clients[seconds]
