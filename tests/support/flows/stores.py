"""Stores in a directory that count what is asked of them, stop, or hand out wrong bytes."""

import threading
from collections.abc import Callable
from pathlib import Path

from infra.storage.base import OnBytes, ignore_bytes
from infra.storage.local import LocalStore


class CountingStore(LocalStore):
    """Remembers the keys whose objects were fetched and uploaded."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.fetched: list[str] = []
        self.uploaded: list[str] = []

    def fetch(self, key: str, path: Path, *, size: int, on_bytes: OnBytes = ignore_bytes) -> None:
        self.fetched.append(key)
        super().fetch(key, path, size=size, on_bytes=on_bytes)

    def upload(self, key: str, path: Path, *, on_bytes: OnBytes = ignore_bytes) -> None:
        self.uploaded.append(key)
        super().upload(key, path, on_bytes=on_bytes)


class DyingStore(CountingStore):
    """A fetch from it is stopped by Ctrl-C after the first file that has bytes."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._lock = threading.Lock()
        self._has_bytes = False

    def fetch(self, key: str, path: Path, *, size: int, on_bytes: OnBytes = ignore_bytes) -> None:
        with self._lock:
            if self._has_bytes:
                raise KeyboardInterrupt
            super().fetch(key, path, size=size, on_bytes=on_bytes)
            self._has_bytes = size > 0


class NoisyStore(CountingStore):
    """Damages an object on its way: `noise` is given its bytes and how often it was asked for."""

    def __init__(self, directory: Path, noise: Callable[[bytes, int], bytes]) -> None:
        super().__init__(directory)
        self._noise = noise
        self._lock = threading.Lock()

    def fetch(self, key: str, path: Path, *, size: int, on_bytes: OnBytes = ignore_bytes) -> None:
        with self._lock:
            time = self.fetched.count(key)
            super().fetch(key, path, size=size)
        data = self._noise(path.read_bytes(), time)
        path.unlink()
        path.write_bytes(data)
        on_bytes(len(data))
