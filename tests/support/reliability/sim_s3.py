"""The product's own S3Store over a simulated bucket: its repeats, and what it makes of a 412.

The bucket answers as S3 does: 412 also to a writer whose first try succeeded and whose answer was
lost, 404 to a condition on what is not there, 409, 500 after the write, 503. The store is not
probed (it is atomic) and nothing goes in parts.
"""

import io
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any

from botocore.exceptions import ClientError  # pyright: ignore[reportMissingTypeStubs]

from infra.storage.base import VersionedObject
from infra.storage.s3.errors import NoResponse
from infra.storage.s3.store import S3Store
from nanochat_core.errors import StoreError
from tests.support.reliability.sim_store import Objects
from tests.support.reliability.sim_world import Process, Request

_BUCKET = "bucket"


class SimS3Store(S3Store):
    """As one process sees it."""

    def __init__(self, objects: Objects, process: Process) -> None:
        super().__init__(f"s3://{_BUCKET}/store")
        self.objects = objects
        self.process = process
        self.client: Any = _SimClient(objects, process, self.prefix)
        self.has_accepted = True
        self.faults = ()


class _SimClient:
    """In place of botocore's client: one request each, over the simulated network."""

    meta = SimpleNamespace(endpoint_url="http://simulated")

    def __init__(self, objects: Objects, process: Process, prefix: str) -> None:
        self._objects = objects
        self._process = process
        self._prefix = prefix

    def put_object(
        self, *, Bucket: str, Key: str, Body: bytes, IfMatch: str = "", IfNoneMatch: str = ""
    ) -> Mapping[str, str]:
        if IfMatch:
            self._ask("swap", Key, self._swap, Body, IfMatch.strip('"'))
        elif IfNoneMatch:
            self._ask("create", Key, self._create, Body)
        else:
            self._ask("put", Key, self._objects.put, Body)
        return {"ETag": '"of this write"'}

    def get_object(self, *, Bucket: str, Key: str) -> Mapping[str, Any]:
        found: VersionedObject = self._ask("get", Key, self._get)
        now = int(self._objects.world.now)
        return {
            "Body": io.BytesIO(found.data),
            "ContentLength": len(found.data),
            "ETag": f'"{found.version}"',
            "LastModified": datetime.fromtimestamp(now - found.age, UTC),
            "ResponseMetadata": {"HTTPHeaders": {"date": formatdate(now, usegmt=True)}},
        }

    def head_object(self, *, Bucket: str, Key: str) -> Mapping[str, Any]:
        return self.get_object(Bucket=Bucket, Key=Key)

    def list_objects_v2(self, *, Bucket: str, Prefix: str, StartAfter: str = "") -> Any:
        names = self._ask("list", Prefix, self._objects.list)
        found: list[dict[str, Any]] = []
        for name in names:
            stored = self._objects.stored.get(name)  # None: deleted since
            written = datetime.fromtimestamp(stored.written if stored else 0, UTC)
            size, etag = (len(stored.data), stored.version) if stored else (0, "")
            key = self._prefix + name
            found.append({"Key": key, "Size": size, "LastModified": written, "ETag": etag})
        return {"Name": Bucket, "Contents": [one for one in found if one["Key"] > StartAfter]}

    def delete_object(self, *, Bucket: str, Key: str) -> Mapping[str, str]:
        self._ask("delete", Key, self._objects.delete)
        return {}

    def _get(self, request: Request) -> Any:
        found = self._objects.get(request)
        return found if isinstance(found, VersionedObject) else _error(404, "NoSuchKey")

    def _create(self, request: Request) -> ClientError | None:
        if request.key in self._objects.stored:
            return _error(412, "PreconditionFailed")
        self._objects.put(request)
        return None

    def _swap(self, request: Request) -> ClientError | None:
        old = self._objects.stored.get(request.key)
        if old is None:
            return _error(404, "NoSuchKey")
        if old.version != request.version:
            return _error(412, "PreconditionFailed")
        self._objects.put(request)
        return None

    def _ask(
        self,
        verb: str,
        key: str,
        take_effect: Callable[[Request], Any],
        data: bytes = b"",
        version: str = "",
    ) -> Any:
        name = key.removeprefix(self._prefix)
        request = Request(self._process, verb, name, data, version)
        self._objects.on_send(request)
        try:
            return self._objects.world.ask(request, lambda r: self._serve(r, take_effect))
        except StoreError as error:
            raise NoResponse(str(error)) from error

    def _serve(self, request: Request, take_effect: Callable[[Request], Any]) -> Any:
        """An overloaded server refuses before or, worse, after it did what was asked."""
        if request.fault != "refused":
            return take_effect(request)
        when = self._objects.world.rng.random()
        if when < 0.3:
            return _error(503, "SlowDown")
        if when < 0.6 and request.verb in ("create", "swap"):
            return _error(409, "ConditionalRequestConflict")
        take_effect(request)
        return _error(500, "InternalError")


def _error(status: int, code: str) -> ClientError:
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, "simulated")
