"""The product's own S3Store over a simulated bucket: its repeats, and what it makes of a 412.

The bucket answers as S3 does: 412 also to a writer whose first try succeeded and whose answer was
lost, 404 to a condition on what is not there, 409, 500 after the write, 503. The store is not
probed (it is atomic) and nothing goes in parts.
"""

from collections.abc import Callable, Mapping
from typing import Any

from infra.storage.base import ObjectInfo, ObjectNotFound, VersionedObject
from infra.storage.s3.errors import ErrorResponse, NoResponse, Page, Where
from infra.storage.s3.settings import Settings
from infra.storage.s3.store import S3Store
from nanochat_core.errors import StoreError
from tests.support.reliability.sim_store import Objects
from tests.support.reliability.sim_world import Process, Request

_URL = "s3://bucket/store"
_SETTINGS = Settings(addressing=None)


class SimS3Store(S3Store):
    """As one process sees it."""

    def __init__(self, objects: Objects, process: Process) -> None:
        super().__init__(_URL, settings=_SETTINGS)
        self.objects = objects
        self.process = process
        self.bucket: Any = _SimBucket(objects, process)
        self.faults = ()


class _SimBucket:
    """In place of infra.storage.s3.bucket.Bucket: one request each, over the simulated network."""

    url = _URL
    where = Where(
        url=_URL, bucket="bucket", endpoint="http://simulated", setting="nothing", is_aws=False
    )
    has_answered = True
    has_accepted = True

    def __init__(self, objects: Objects, process: Process) -> None:
        self._objects = objects
        self._process = process

    def put(self, key: str, data: bytes, *, condition: Mapping[str, str] = {}) -> None:
        if not condition:
            self._ask("put", key, self._objects.put, data)
        elif "IfMatch" in condition:
            self._ask("swap", key, self._swap, data, condition["IfMatch"].strip('"'))
        else:
            self._ask("create", key, self._create, data)

    def get(self, key: str, *, limit: int) -> bytes:
        return self.get_stored(key).data

    def get_stored(self, key: str) -> VersionedObject:
        return self._ask("get", key, self._objects.get)

    def list_page(self, prefix: str, *, after: str | None, token: str | None) -> Page:
        names = self._ask("list", prefix, self._objects.list)
        now = self._objects.world.now
        entries = [
            ObjectInfo(key=n, size=0, modified=now, etag="")
            for n in names
            if after is None or n > after
        ]
        return Page(entries=entries, has_more=False, token=None)

    def delete(self, key: str) -> None:
        self._ask("delete", key, self._objects.delete)

    def _create(self, request: Request) -> ErrorResponse | None:
        if request.key in self._objects.stored:
            return ErrorResponse("PreconditionFailed", status=412)
        self._objects.put(request)
        return None

    def _swap(self, request: Request) -> ObjectNotFound | ErrorResponse | None:
        old = self._objects.stored.get(request.key)
        if old is None:
            return ObjectNotFound(request.key)
        if old.version != request.version:
            return ErrorResponse("PreconditionFailed", status=412)
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
        request = Request(self._process, verb, key, data, version)
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
            return ErrorResponse("SlowDown", status=503)
        if when < 0.6 and request.verb in ("create", "swap"):
            return ErrorResponse("ConditionalRequestConflict", status=409)
        take_effect(request)
        return ErrorResponse("InternalError", status=500)
