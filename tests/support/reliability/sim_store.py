"""A store in memory whose every verb goes through a simulated network and may go wrong.

Simulated (the contract of infra/storage/base.py, seen by processes in virtual time): slow requests
and answers; lost requests; lost answers (it happened, the caller sees StoreError); a client that
asks again by itself and answers what the second time gave; requests delivered twice, the second
time at once or minutes later (an old PUT or DELETE comes back); damaged answers to reads; lists out
of date, also by minutes; processes that die before or after any operation's effect, and start again
in the same home; processes that stop for longer than a lease lasts and go on; wall clocks of
machines and of the store that are set back and forward while leases are held.

Not simulated: half-written objects (stores write whole ones; their tests hold them to that), and
objects that rot after they were written; the disk and its flushes; botocore and the wire of S3
(half of the histories run the real S3Store over a simulated bucket, see sim_s3.py); stores without
atomic conditions; threads of one process between two operations; several files of one artifact
(publish uploads them from a pool of threads); more than one fingerprint at a time; garbage
collection.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

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
from infra.storage.files import replacing
from tests.support.reliability.sim_world import Process, Request, World


class Object:
    """What is stored under a key."""

    __slots__ = ("data", "dated", "version", "written")

    def __init__(self, data: bytes, written: float, dated: float) -> None:
        self.data = data
        self.version = hashlib.sha256(data).hexdigest()  # the same bytes again: the same version
        self.written = written
        self.dated = dated  # the same moment by the store's wall clock


# Called for every effect: what was asked, the object before and after.
OnEffect: TypeAlias = Callable[[Request, Object | None, Object | None], None]


class Objects:
    """The server's side: every effect happens whole, at one moment."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stored: dict[str, Object] = {}
        self.on_send: Callable[[Request], None] = lambda request: None
        self.on_effect: OnEffect = lambda *effect: None
        self._comings: list[tuple[float, str, bool]] = []  # when, key, came or went

    def put(self, request: Request) -> None:
        """Over an older one if need be."""
        self._write(request, request.data)

    def create(self, request: Request) -> bool:
        """Unless there is one; whether these bytes are there."""
        old = self.stored.get(request.key)
        if old is None:
            self._write(request, request.data)
            return True
        return old.data == request.data

    def swap(self, request: Request) -> bool:
        """Unless it changed since; whether these bytes are there."""
        old = self.stored.get(request.key)
        if old is None:
            return False
        if old.version == request.version:
            self._write(request, request.data)
            return True
        return old.data == request.data

    def get(self, request: Request) -> VersionedObject | ObjectNotFound:
        """The object, damaged on its way perhaps."""
        old = self.stored.get(request.key)
        if old is None:
            return ObjectNotFound(request.key)
        self.on_effect(request, old, old)
        data = old.data
        if request.fault == "damaged":
            data = damage(data, self.world.rng)
        age = max(0.0, self.world.now + self.world.store_skew - old.dated)
        return VersionedObject(data=data, version=old.version, age=age)

    def delete(self, request: Request) -> None:
        """Nothing happens when there is none."""
        if request.key in self.stored:
            self._write(request, None)

    def list(self, request: Request) -> list[str]:
        """Keys that start with the request's, perhaps as they were some minutes ago."""
        names = set(self.stored)
        if request.fault == "stale":
            at = self.world.now - self.world.rng.uniform(0.0, 300.0)
            names = set()
            for when, key, came in self._comings:
                if when <= at:
                    names.add(key) if came else names.discard(key)
        return sorted(name for name in names if name.startswith(request.key))

    def _write(self, request: Request, data: bytes | None) -> None:
        key = request.key
        old = self.stored.get(key)
        new = None
        if data is None:
            del self.stored[key]
        else:
            new = self.stored[key] = Object(
                data, self.world.now, self.world.now + self.world.store_skew
            )
        if (old is None) != (new is None):
            self._comings.append((self.world.now, key, new is not None))
        self.on_effect(request, old, new)


class SimStore:
    """The store as one process sees it, with the verbs of infra.storage.base.Store."""

    def __init__(self, objects: Objects, process: Process) -> None:
        self.objects = objects
        self.process = process

    @property
    def url(self) -> str:
        return "sim://store"

    def put(self, key: str, data: bytes) -> None:
        self.ask("put", key, self.objects.put, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self.ask("create", key, self.objects.create, data)

    def put_if_same(self, key: str, data: bytes, *, version: str) -> bool:
        return self.ask("swap", key, self.objects.swap, data, version)

    def get(self, key: str, *, size: int | None = None) -> bytes:
        data = self.get_stored(key).data
        check_size(f"{self.url}/{key}", len(data), MAX_RECORD if size is None else size)
        return data

    def get_stored(self, key: str) -> VersionedObject:
        return self.ask("get", key, self.objects.get)

    def head(self, key: str) -> ObjectInfo:
        self.get_stored(key)
        return self._entry(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for key in self.ask("list", prefix, self.objects.list):
            yield self._entry(key)

    def delete(self, key: str) -> None:
        self.ask("delete", key, self.objects.delete)

    def upload(self, key: str, path: Path, *, on_bytes: OnBytes = ignore_bytes) -> None:
        self.put(key, path.read_bytes())
        on_bytes(path.stat().st_size)

    def fetch(self, key: str, path: Path, *, size: int, on_bytes: OnBytes = ignore_bytes) -> None:
        with replacing(path) as temporary:
            temporary.write_bytes(self.get(key, size=size))
        on_bytes(path.stat().st_size)

    def abort_stale_uploads(self, *, before: float) -> int:
        return 0

    def check_conditions(self) -> None:
        """Nothing: conditions are atomic here."""

    def _entry(self, key: str) -> ObjectInfo:
        found = self.objects.stored.get(key)
        if found is None:  # deleted since it was asked for
            return ObjectInfo(key=key, size=0, modified=self.objects.world.now)
        return ObjectInfo(key=key, size=len(found.data), modified=found.written)

    def ask(
        self,
        verb: str,
        key: str,
        take_effect: Callable[[Request], Any],
        data: bytes = b"",
        version: str = "",
    ) -> Any:
        request = Request(
            self.process, verb, key if verb == "list" else check_key(key), data, version
        )
        self.objects.on_send(request)
        return self.objects.world.ask(request, take_effect)


def damage(data: bytes, rng: random.Random) -> bytes:
    """These bytes cut short, or with one of them changed."""
    if not data or rng.random() < 0.5:
        return data[: rng.randrange(len(data) + 1)]
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
