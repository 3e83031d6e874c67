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
from flows.identity.rebuilds import find_rebuild_mark
from flows.identity.ref import ArtifactRef
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
        self._reads: dict[tuple[str, ArtifactRef], Future[object]] = {}
        self._index = pool.submit(self._list)

    def find(self, ref: ArtifactRef) -> Manifest | None:
        """Return an artifact. Starts reading what may make it stale, which is needed next."""
        self._ask(find_revocation, ref)
        self._ask(find_rebuild_mark, ref)
        return self._read(find_manifest, ref)

    def find_revocation(self, ref: ArtifactRef) -> Revocation | None:
        """Return the revocation of an artifact, or None."""
        return self._read(find_revocation, ref)

    def is_rebuilt(self, manifest: Manifest) -> bool:
        """Return whether a rebuild of this artifact began and has not replaced it yet."""
        mark = self._read(find_rebuild_mark, manifest.ref)
        return mark is not None and mark.is_of(manifest)

    def newest(
        self, stage: str, count: int, *, keep: Callable[[Manifest], bool]
    ) -> Iterator[Manifest]:
        """Return the last artifacts of a stage, newest first, like `artifacts.newest_manifests`."""
        names = self._index.result().get(stage, [])[: _LOOKED_AT * count]
        refs = [ArtifactRef(stage, name) for name in names]
        for ref in refs[:count]:
            self._ask(find_manifest, ref)
        # Lazy: past the first `count`, a manifest is read only if an earlier one is missing.
        found = map(self._find_whole, refs)
        return islice((m for m in found if m is not None and keep(m)), count)

    def _find_whole(self, ref: ArtifactRef) -> Manifest | None:
        try:
            return self._read(find_manifest, ref)
        except ArtifactError as error:  # a damaged candidate fails no plan, it is reported
            self.unread.append(str(error))
            return None

    def _ask(self, read: Callable[[Store, ArtifactRef], _T], ref: ArtifactRef) -> "Future[_T]":
        key = (read.__name__, ref)
        with self._lock:
            if key not in self._reads:
                self._reads[key] = self._pool.submit(read, self._store, ref)
            return self._reads[key]  # type: ignore[return-value]

    def _read(self, read: Callable[[Store, ArtifactRef], _T], ref: ArtifactRef) -> _T:
        """Return the result of a read that is done, running, or done here."""
        future = self._ask(read, ref)
        if not future.cancel():
            return future.result()
        # `cancel` succeeds only while the read is queued behind the read-ahead: do not wait for
        # that, read in this thread. Only one thread plans a stage, so none waits on the future.
        found = read(self._store, ref)
        done: Future[object] = Future()
        done.set_result(found)
        with self._lock:
            self._reads[read.__name__, ref] = done
        return found

    def _list(self) -> Mapping[str, list[str]]:
        """Return stage -> fingerprints, newest first. Starts reading the newest of each stage."""
        index = read_index(self._store)
        for stage in STAGES:
            for name in index.get(stage.name, [])[:1]:
                ref = ArtifactRef(stage.name, name)
                self._ask(find_manifest, ref)
                self._ask(find_revocation, ref)
                self._ask(find_rebuild_mark, ref)
        return index
