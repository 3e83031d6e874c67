"""List the artifacts and tags of a store for display.

The index (index/{stage}/{created}-{fingerprint}) names the newest artifacts; it decides nothing,
and may lack one or name one that is gone. Only records that are shown are read, several at a time,
so the cost does not grow with the store.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from flows.artifacts.publish import find_manifest, read_index
from flows.artifacts.revocations import Revoked, find_revoked
from flows.artifacts.runs import Run, find_run, find_tag, latest_runs, tag_names
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from flows.stages import in_order
from infra.parallel import in_parallel
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError

GONE = "gone"
_RUNS = 20  # the latest runs, whose names are looked up

Names: TypeAlias = dict[ArtifactRef, tuple[str, ...]]  # tags and names of runs that lead to it


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One row of a list of artifacts."""

    ref: ArtifactRef
    manifest: Manifest | None
    revoked: Revoked | None
    names: tuple[str, ...]  # NAME with which STAGE@NAME is this artifact
    problem: str  # why there is no manifest; "" if there is one

    @property
    def size(self) -> int:
        """Return the bytes of its files, without logs. 0 without a manifest."""
        return sum(file.size for file in self.manifest.files) if self.manifest else 0

    def to_tree(self) -> dict[str, Any]:
        """Return the row as JSON values, for `nanochat ls --json`."""
        made = self.manifest.provenance if self.manifest else None
        return {
            "stage": self.ref.stage,
            "fingerprint": self.ref.fingerprint,
            "created": made.created if made else None,
            "run": made.run if made else None,
            "files": len(self.manifest.files) if self.manifest else None,
            "bytes": self.size if self.manifest else None,
            "names": list(self.names),
            "revoked": asdict(self.revoked.revocation) if self.revoked else None,
            "accepted": self.manifest.accepted if self.manifest else None,
            "problem": self.problem or None,
        }


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A list of artifacts, also gone ones, by the table of stages and then newest first."""

    artifacts: tuple[Listed, ...]
    more: int  # index entries that were not read
    unread: tuple[str, ...]  # why records that may name these artifacts cannot be read


@dataclass(frozen=True, kw_only=True)
class Tagged:
    """A tag and the run that it stands for."""

    name: str
    run: str  # id; "" when its record is damaged
    record: Run | None
    problem: str  # why there is no record; "" if there is one
    is_damaged: bool = False  # one of the two records cannot be read


def list_newest(store: Store, *, count: int, stage: str | None = None) -> Listing:
    """Return the last `count` artifacts of each stage, or of one."""
    index = read_index(store, stage)
    chosen = [ArtifactRef(n, found) for n in in_order(index) for found in index[n][:count]]
    return _list(store, chosen, more=sum(map(len, index.values())) - len(chosen))


def list_run(store: Store, run: Run, *, stage: str | None = None) -> Listing:
    """Return the artifacts of a run."""
    stages = [name for name in in_order(run.stages) if stage in (name, None)]
    return _list(store, [ArtifactRef(name, run.stages[name]) for name in stages])


def list_artifact(store: Store, ref: ArtifactRef) -> Listing:
    """Return a list of one artifact."""
    return _list(store, [ref])


def _list(store: Store, refs: Iterable[ArtifactRef], *, more: int = 0) -> Listing:
    unread: list[str] = []
    names = names_of(store, unread=unread)
    artifacts = tuple(in_parallel(lambda ref: _look_at(store, ref, names), refs))
    return Listing(artifacts=artifacts, more=more, unread=tuple(unread))


def names_of(store: Store, *, unread: list[str]) -> Names:
    """Return the names of artifacts: every tag, and the names of the latest runs.

    Of several runs of one name the latest that has a stage counts, of finished ones if there are
    any, as for STAGE@NAME. A record that cannot be read names nothing; the reason is appended to
    `unread`.
    """
    found: dict[ArtifactRef, dict[str, None]] = {}
    tags = list_tags(store)
    unread += [tag.problem for tag in tags if tag.is_damaged]
    for tag in tags:
        for ref in tag.record.refs if tag.record else ():
            found.setdefault(ref, {})[tag.name] = None
    hidden = {tag.name for tag in tags}  # a tag comes before a run's name
    taken: set[tuple[str, str]] = set()
    latest = latest_runs(store, _RUNS, unread=unread)
    finished = {run.name for run in latest if run.status == "finished"}
    for run in latest:
        if run.name in hidden or (run.name in finished and run.status != "finished"):
            continue
        for ref in run.refs:
            if (ref.stage, run.name) not in taken:
                taken.add((ref.stage, run.name))
                found.setdefault(ref, {})[run.name] = None
    return {ref: tuple(names) for ref, names in found.items()}


def list_tags(store: Store) -> list[Tagged]:
    """Return every tag, in order of name. A damaged record is noted in its row, not an error."""
    return list(in_parallel(lambda name: read_tag(store, name), tag_names(store)))


def read_tag(store: Store, name: str) -> Tagged:
    """Return a tag's row. A damaged record is noted in the row, not an error."""
    run, record, problem, is_damaged = "", None, "", False
    try:
        run = find_tag(store, name) or ""
        record = find_run(store, run) if run else None
        problem = "" if record else "its run has no record" if run else GONE
    except ArtifactError as error:
        problem, is_damaged = str(error), True
    return Tagged(name=name, run=run, record=record, problem=problem, is_damaged=is_damaged)


def _look_at(store: Store, ref: ArtifactRef, names: Names) -> Listed:
    """Return an artifact's row. A damaged record is noted in the row, not an error."""
    manifest, revoked, problem = None, None, GONE
    try:
        if found := find_manifest(store, ref):
            revoked = find_revoked(store, found)
            manifest, problem = found, ""
    except ArtifactError as error:
        problem = str(error)
    return Listed(
        ref=ref,
        manifest=manifest,
        revoked=revoked,
        names=names.get(ref, ()),
        problem=problem,
    )
