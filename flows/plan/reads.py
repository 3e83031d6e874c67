"""Read a plan's records from the store: one LIST of the index, each record once, in parallel.

A stage's fingerprint depends on the manifests of its inputs, so reading on demand would cost a
round trip for each level of stages. Most often the newest artifact of a stage is the one that the
plan needs: those are read ahead.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

from flows.artifacts.publish import find_manifest, read_index
from flows.artifacts.revocations import Revocation, find_revocation
from flows.artifacts.runs import find_whole_run, newest_first, read_all
from flows.identity.manifest import Manifest
from flows.identity.rebuilds import find_rebuild_mark
from flows.identity.ref import ArtifactRef, name_in
from flows.stages import STAGES
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError

_LOOKED_AT = 4  # candidates for each artifact that is wanted: the newest may be gone
_RUNS = 4  # latest runs of the profile's name, of names that begin with it, and of others
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class _Runs:
    """The last runs of a profile."""

    ids: frozenset[str]  # of all runs that have a record
    profiles: dict[str, str | None]  # by the id of the run, as far as known
    refs: tuple[ArtifactRef, ...]  # of the profile's runs that were read, the latest first


def _read_runs(store: Store, profile: str | None) -> _Runs:
    ids = newest_first(store.list("runs/"))
    names = {run: name_in(run) or "" for run in ids}
    own = [run for run in ids if names[run] == profile]
    alike = [run for run in ids if names[run].startswith(f"{profile}-")]
    others = [run for run in ids if run not in {*own, *alike}]
    chosen = [*own[:_RUNS], *alike[:_RUNS], *others[:_RUNS]] if profile else []
    runs = [run for run in read_all(partial(find_whole_run, store), chosen) if run is not None]
    runs.sort(key=lambda run: run.started, reverse=True)
    return _Runs(
        ids=frozenset(ids),
        profiles={run.run: run.profile for run in runs},
        refs=tuple(ref for run in runs if run.profile == profile for ref in run.refs),
    )


class PlanReads:
    """A cache of one plan's reads, each done once, by a thread of `pool` where possible."""

    def __init__(self, store: Store, pool: ThreadPoolExecutor, profile: str | None = None) -> None:
        self.unread: list[str] = []  # why earlier artifacts cannot be read
        self._store = store
        self._pool = pool
        self._lock = threading.Lock()
        self._reads: dict[tuple[str, ArtifactRef], Future[object]] = {}
        self._profile = profile
        self._runs: Future[_Runs] | None = None
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
        self._ask_for_runs()
        for ref in refs[:count]:
            self._ask(find_manifest, ref)
        # Lazy: past the first `count`, a manifest is read only if an earlier one is missing.
        found = map(self._find_whole, refs)
        return islice((m for m in found if m is not None and keep(m)), count)

    def history(
        self, stage: str, count: int, *, keep: Callable[[Manifest], bool]
    ) -> tuple[list[Manifest], list[Manifest]]:
        """Return artifacts of a stage: those of the profile's runs, and those with the newest."""
        newest = list(self.newest(stage, count, keep=keep))
        if self._profile is None:
            return newest, newest
        runs = self._ask_for_runs().result()
        refs = list(dict.fromkeys(ref for ref in runs.refs if ref.stage == stage))[:count]
        for ref in refs:
            self._ask(find_manifest, ref)
        found = [m for m in map(self._find_whole, refs) if m is not None and keep(m)]
        own = [*found, *(m for m in newest if self._is_own(m.provenance.run, runs))]
        return own, [*{manifest.fingerprint: manifest for manifest in (*newest, *own)}.values()]

    def _is_own(self, run: str, runs: "_Runs") -> bool:
        """Return whether the run was of the profile, or has no record, so that it may have been."""
        if run not in runs.profiles:
            found = find_whole_run(self._store, run) if run in runs.ids else None
            runs.profiles[run] = found.profile if found else self._profile
        return runs.profiles[run] == self._profile

    def _ask_for_runs(self) -> "Future[_Runs]":
        """Start to read the last runs of the profile, once."""
        with self._lock:
            if self._runs is None:
                self._runs = self._pool.submit(_read_runs, self._store, self._profile)
            return self._runs

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
