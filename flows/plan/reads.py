"""Read a plan's records from the store: one LIST of the index, each record once, in parallel.

A stage's fingerprint depends on the manifests of its inputs, so reading on demand would cost a
round trip for each level of stages. Most often the newest artifact of a stage is the one that the
plan needs: those are read ahead.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice, product
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from flows.artifacts import checkpoints
from flows.artifacts.publish import find_manifest, read_index
from flows.artifacts.revocations import Revocation, find_revocation
from flows.artifacts.runs import Run, find_whole_run, listed_runs
from flows.identity.diff import is_built
from flows.identity.fingerprint import Identity
from flows.identity.manifest import Manifest
from flows.identity.records import unless_damaged
from flows.identity.redo import RedoCounter, find_redo
from flows.identity.ref import ArtifactRef
from flows.leases import file_lock
from flows.stages import STAGES
from infra.parallel import in_parallel
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError

_HISTORY = 5  # newest artifacts of a stage, read for its reason and its estimate
_RUNS = 4  # latest runs of the profile's name, of names that begin with it, and of others
_T = TypeVar("_T")
_K = TypeVar("_K", ArtifactRef, str)
_Read: TypeAlias = Callable[[Store, _K], _T]
_RECORDS: tuple[_Read[ArtifactRef, Any], ...] = (find_redo, find_manifest, find_revocation)


class PlanReads:
    """A cache of one plan's reads."""

    def __init__(self, store: Store, profile: str | None = None) -> None:
        self.unread: list[str] = []  # why earlier artifacts cannot be read
        self._store = store
        self._profile = profile
        self._known: dict[tuple[_Read[Any, Any], ArtifactRef | str], Any] = {}
        self._index = read_index(store)
        self._read_ahead(product(_RECORDS, self._newest_of([stage.name for stage in STAGES], 1)))

    def redo_of(self, recipe: ArtifactRef) -> RedoCounter:
        """Return a recipe's counter. Reads with it the artifact with number 0, needed next."""
        self._read_ahead(product(_RECORDS, [recipe]))
        return self._read(find_redo, recipe)

    def find(self, ref: ArtifactRef) -> Manifest | None:
        """Return an artifact. Reads with it its revocation, which is needed next."""
        self._read_ahead(product((find_manifest, find_revocation), [ref]))
        return self._read(find_manifest, ref)

    def find_revocation(self, ref: ArtifactRef) -> Revocation | None:
        """Return the revocation of an artifact, or None."""
        return self._read(find_revocation, ref)

    def read_newest(self, stages: Iterable[str]) -> None:
        """Read the last artifacts of these stages, which `history` needs next."""
        self._read_ahead(product([find_manifest], self._newest_of(stages, _HISTORY)))

    def history(self, stage: str) -> tuple[list[Manifest], list[Manifest]]:
        """Return builds of a stage: those of the profile's runs, and those with the newest."""
        self.read_newest([stage])
        # Lazy: past the first few, a manifest is read only if an earlier one is missing.
        newest = list(islice(self._built(self._newest_of([stage], 4 * _HISTORY)), _HISTORY))
        if self._profile is None:
            return newest, newest
        found = filter(None, (run.find_ref(stage) for run in self._runs))
        refs = list(dict.fromkeys(found))[:_HISTORY]
        self._read_ahead(product([find_manifest], refs))
        own = [*self._built(refs), *(m for m in newest if self._is_own(m.provenance.run))]
        return own, [*{manifest.fingerprint: manifest for manifest in (*newest, *own)}.values()]

    def _newest_of(self, stages: Iterable[str], count: int) -> list[ArtifactRef]:
        index = self._index
        return [
            ArtifactRef(name, found) for name in stages for found in index.get(name, [])[:count]
        ]

    def _built(self, refs: Iterable[ArtifactRef]) -> Iterator[Manifest]:
        for ref in refs:
            # A damaged candidate fails no plan, it is reported.
            read = partial(self._read, find_manifest, ref)
            found = unless_damaged(read, self.unread.append)
            if found is not None and is_built(found):
                yield found

    def _is_own(self, run: str) -> bool:
        """Return whether the run was of the profile, or has no record, so that it may have been."""
        found = self._read(find_whole_run, run)
        return found is None or found.profile == self._profile

    @cached_property
    def _runs(self) -> list[Run]:
        """The last runs of the profile that can be read, the latest first."""
        listed = listed_runs(self._store)
        own = [run for name, run in listed if name == self._profile]
        alike = [run for name, run in listed if name.startswith(f"{self._profile}-")]
        others = [run for _, run in listed if run not in {*own, *alike}]
        chosen = [*own[:_RUNS], *alike[:_RUNS], *others[:_RUNS]]
        self._read_ahead(product([find_whole_run], chosen))
        found = filter(None, (self._read(find_whole_run, run) for run in chosen))
        runs = [run for run in found if run.profile == self._profile]
        return sorted(runs, key=lambda run: run.started, reverse=True)

    def _read_ahead(self, reads: Iterable[tuple[_Read[_K, Any], _K]]) -> None:
        """Read records in parallel. A damaged one is read again where it is needed, and raises."""

        def read(item: tuple[_Read[_K, Any], _K]) -> None:
            with contextlib.suppress(ArtifactError):
                self._read(*item)

        for _ in in_parallel(read, [item for item in reads if item not in self._known]):
            pass

    def _read(self, read: _Read[_K, _T], ref: _K) -> _T:
        if (read, ref) not in self._known:
            self._known[read, ref] = read(self._store, ref)
        return self._known[read, ref]


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The newest checkpoint of an unfinished job."""

    step: int
    total: int
    in_store: bool  # the store has it, this machine has to fetch it

    def __str__(self) -> str:
        return f"step {self.step}/{self.total}{', from the store' if self.in_store else ''}"


def find_resume(store: Store, work: Path, identity: Identity) -> Resume | None:
    """Return the checkpoint that a job would resume from; on a tie the one on this machine."""
    ref = identity.ref
    here = _find_here(file_lock.work_directory(work, ref))
    steps = checkpoints.find_steps(store, ref)
    if steps and (here is None or steps[0] > here.step):
        return Resume(step=steps[0], total=steps[1], in_store=True)
    return here


def _find_here(directory: Path) -> Resume | None:
    """Return the newest checkpoint on this machine that has its COMMIT.json, written last."""
    found: list[Resume] = []
    for path in directory.glob("checkpoints/step-*/COMMIT.json"):
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            step, total = int(tree["step"]), int(tree["total"])
            found.append(Resume(step=step, total=total, in_store=False))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # the job will not use it either
    return max(found, key=lambda resume: resume.step, default=None)
