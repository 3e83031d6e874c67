"""A store in memory with a clock that tests set: what is old in it became so at once."""

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

from infra.storage.base import (
    ObjectInfo,
    ObjectNotFound,
    OnBytes,
    VersionedObject,
    check_key,
    ignore_bytes,
)

DAY, HOUR = 86400.0, 3600.0


class MemoryStore:
    """Objects with the moments they were written at. Any number of threads may use it."""

    def __init__(self) -> None:
        self.now = 1_000_000.0  # the store's clock; tests move it
        self.unfinished: list[float] = []  # when half written objects were begun
        self.deleted: list[str] = []  # keys, in order
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.RLock()

    @property
    def url(self) -> str:
        """See Store."""
        return "memory://store"

    def put(self, key: str, data: bytes) -> None:
        """See Store."""
        with self._lock:
            self._objects[check_key(key)] = (data, self.now)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See Store."""
        with self._lock:
            if key not in self._objects:
                self.put(key, data)
            return self._objects[key][0] == data

    def put_if_same(self, key: str, data: bytes, *, version: str) -> bool:
        """See Store."""
        with self._lock:
            if key not in self._objects:
                return False
            if _version(self.get(key)) == version:
                self.put(key, data)
            return self.get(key) == data

    def get(self, key: str, *, size: int | None = None) -> bytes:
        """See Store."""
        return self.get_stored(key).data

    def get_stored(self, key: str) -> VersionedObject:
        """See Store."""
        with self._lock:
            if key not in self._objects:
                raise ObjectNotFound(key)
            data, written = self._objects[key]
            return VersionedObject(data=data, version=_version(data), age=self.now - written)

    def head(self, key: str) -> ObjectInfo:
        """See Store."""
        with self._lock:
            if key not in self._objects:
                raise ObjectNotFound(key)
            return self._entry(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See Store."""
        with self._lock:
            keys = sorted(key for key in self._objects if key.startswith(prefix))
            entries = [self._entry(key) for key in keys]
        yield from entries

    def delete(self, key: str) -> None:
        """See Store."""
        with self._lock:
            if self._objects.pop(key, None) is not None:
                self.deleted.append(key)

    def upload(self, key: str, path: Path, *, on_bytes: OnBytes = ignore_bytes) -> None:
        """See Store."""
        self.put(key, path.read_bytes())
        on_bytes(path.stat().st_size)

    def fetch(self, key: str, path: Path, *, size: int, on_bytes: OnBytes = ignore_bytes) -> None:
        """See Store."""
        path.write_bytes(self.get(key, size=size))
        on_bytes(path.stat().st_size)

    def abort_stale_uploads(self, *, older_than: float) -> int:
        """See Store."""
        old = [begun for begun in self.unfinished if self.now - begun > older_than]
        self.unfinished = [begun for begun in self.unfinished if begun not in old]
        return len(old)

    def check_conditions(self) -> None:
        """See Store."""

    def _entry(self, key: str) -> ObjectInfo:
        data, written = self._objects[key]
        return ObjectInfo(key=key, size=len(data), modified=written, etag=_version(data))

    def names(self, prefix: str = "") -> "set[str]":
        """Keys of what there is."""
        with self._lock:
            return {key for key in self._objects if key.startswith(prefix)}


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
