"""Read a plan's records from the store: one LIST of the index, each record once, in parallel.

A stage's fingerprint depends on the manifests of its inputs, so reading on demand would cost a
round trip for each level of stages. Most often the newest artifact of a stage is the one that the
plan needs: those are read ahead.
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

_LOOKED_AT = 4  # candidates for each artifact that is wanted: the newest may be gone
_T = TypeVar("_T")


class PlanReads:
    """A cache of one plan's reads, each done once, by a thread of `pool` where possible."""

    def __init__(self, store: Store, pool: ThreadPoolExecutor) -> None:
        self.unread: list[str] = []  # why earlier artifacts cannot be read
        self._store = store
        self._pool = pool
        self._lock = threading.Lock()
        self._reads: dict[tuple[str, str, str], Future[object]] = {}
        self._index = pool.submit(self._list)

    def find(self, stage: str, fingerprint: str) -> Manifest | None:
        """Return an artifact. Starts reading its revocation, which is needed next."""
        self._ask(find_revocation, stage, fingerprint)
        return self._read(find_manifest, stage, fingerprint)

    def find_revocation(self, stage: str, fingerprint: str) -> Revocation | None:
        """Return the revocation of an artifact, or None."""
        return self._read(find_revocation, stage, fingerprint)

    def newest(
        self, stage: str, count: int, *, keep: Callable[[Manifest], bool]
    ) -> Iterator[Manifest]:
        """Return the last artifacts of a stage, newest first, like `artifacts.newest_manifests`."""
        names = self._index.result().get(stage, [])[: _LOOKED_AT * count]
        for name in names[:count]:
            self._ask(find_manifest, stage, name)
        # Lazy: past the first `count`, a manifest is read only if an earlier one is missing.
        found = (self._find_whole(stage, name) for name in names)
        return islice((m for m in found if m is not None and keep(m)), count)

    def _find_whole(self, stage: str, name: str) -> Manifest | None:
        try:
            return self._read(find_manifest, stage, name)
        except ArtifactError as error:  # a damaged candidate fails no plan, it is reported
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
        """Return the result of a read that is done, running, or done here."""
        future = self._ask(read, stage, fingerprint)
        if not future.cancel():
            return future.result()
        # `cancel` succeeds only while the read is queued behind the read-ahead: do not wait for
        # that, read in this thread. Only one thread plans a stage, so none waits on the future.
        found = read(self._store, stage, fingerprint)
        done: Future[object] = Future()
        done.set_result(found)
        with self._lock:
            self._reads[read.__name__, stage, fingerprint] = done
        return found

    def _list(self) -> Mapping[str, list[str]]:
        """Return stage -> fingerprints, newest first. Starts reading the newest of each stage."""
        index = read_index(self._store)
        for stage in STAGES:
            for name in index.get(stage.name, [])[:1]:
                self._ask(find_manifest, stage.name, name)
                self._ask(find_revocation, stage.name, name)
        return index
