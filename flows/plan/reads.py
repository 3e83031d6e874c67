"""What a plan reads of a store: one LIST of the index, and each record once, several at a time.

A stage's fingerprint is known when those of its inputs are read, so asking for one after the other
would take a way to the store and back for each level of stages. Most often the newest artifact of
each stage is the one that is asked for: those are read ahead.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from flows.artifacts.publish import find_manifest, read_index
from flows.artifacts.revocations import Revocation, find_revocation
from flows.identity.manifest import Manifest
from flows.stages import STAGES
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError

_LOOKED_AT = 4  # times as many artifacts as are wanted, where the newest are gone
_T = TypeVar("_T")


class PlanReads:
    """Reads of one plan. Each is done once, by a thread of `pool`, where none waits for another."""

    def __init__(self, store: Store, pool: ThreadPoolExecutor) -> None:
        self.unread: list[str] = []  # why earlier artifacts cannot be read
        self._store = store
        self._pool = pool
        self._lock = threading.Lock()
        self._reads: dict[tuple[str, str, str], Future[object]] = {}
        self._index = pool.submit(self._list)

    def find(self, stage: str, fingerprint: str) -> Manifest | None:
        """Return an artifact; its revocation, which comes next, is asked for at the same time."""
        self._ask(find_revocation, stage, fingerprint)
        return self._read(find_manifest, stage, fingerprint)

    def find_revocation(self, stage: str, fingerprint: str) -> Revocation | None:
        """Return what took an artifact back, if anything did."""
        return self._read(find_revocation, stage, fingerprint)

    def newest(
        self, stage: str, count: int, *, keep: Callable[[Manifest], bool]
    ) -> Iterator[Manifest]:
        """Return the last artifacts of a stage, newest first, like `artifacts.newest_manifests`."""
        names = self._index.result().get(stage, [])[: _LOOKED_AT * count]
        for name in names[:count]:
            self._ask(find_manifest, stage, name)
        found = (self._find_whole(stage, name) for name in names)
        return islice((m for m in found if m is not None and keep(m)), count)

    def _find_whole(self, stage: str, name: str) -> Manifest | None:
        try:
            return self._read(find_manifest, stage, name)
        except ArtifactError as error:  # as good as gone for a look around
            self.unread.append(str(error))
            return None

    def _ask(
        self, read: Callable[[Store, str, str], _T], stage: str, fingerprint: str
    ) -> "Future[_T]":
        key = (read.__name__, stage, fingerprint)
        with self._lock:
            if key not in self._reads:
                self._reads[key] = self._pool.submit(read, self._store, stage, fingerprint)
            return self._reads[key]  # type: ignore[return-value]

    def _read(self, read: Callable[[Store, str, str], _T], stage: str, fingerprint: str) -> _T:
        """Return what was asked for. Only the thread of this stage waits for it."""
        future = self._ask(read, stage, fingerprint)
        if not future.cancel():
            return future.result()
        # Still behind what is read ahead, so read here.
        found = read(self._store, stage, fingerprint)
        done: Future[object] = Future()
        done.set_result(found)
        with self._lock:
            self._reads[read.__name__, stage, fingerprint] = done
        return found

    def _list(self) -> Mapping[str, list[str]]:
        """Stage -> fingerprints, newest first. Asks for the newest of each stage of the table."""
        index = read_index(self._store)
        for stage in STAGES:
            for name in index.get(stage.name, [])[:1]:
                self._ask(find_manifest, stage.name, name)
                self._ask(find_revocation, stage.name, name)
        return index
