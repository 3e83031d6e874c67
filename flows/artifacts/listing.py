"""List the artifacts and tags of a store for display.

The index (index/{stage}/{created}-{fingerprint}) names the newest artifacts; it decides nothing,
and may lack one or name one that is gone. Only records that are shown are read, several at a time,
so the cost does not grow with the store.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from flows.artifacts.publish import find_manifest, read_index
from flows.artifacts.revocations import Revoked, find_revoked
from flows.artifacts.runs import Run, find_run, find_tag, latest_runs, tag_names
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from flows.stages import STAGES
from infra.parallel import in_parallel
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError

GONE = "gone"
_RUNS = 20  # the latest runs, whose names are looked up
_TRIES = 4  # index entries tried for each artifact shown: some name artifacts that are gone

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
    """A list of artifacts, by the table of stages and then newest first."""

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
    waiting = {name: index[name] for name in _order(index) if name in index}  # as the table has it
    entries = sum(map(len, waiting.values()))
    waiting = {name: found[: _TRIES * count] for name, found in waiting.items()}
    left_out = entries - sum(map(len, waiting.values()))
    unread: list[str] = []
    names = names_of(store, unread=unread)
    shown: dict[str, list[Listed]] = {name: [] for name in waiting}
    # Entries whose artifact is gone leave room, so this reads until each stage has `count`: in
    # batches over all stages, whose records are read in parallel.
    while batch := list(_next_batch(waiting, {n: count - len(shown[n]) for n in shown})):
        for listed in _look_at_all(store, batch, names):
            if listed.problem != GONE:
                shown[listed.ref.stage].append(listed)
    return Listing(
        artifacts=tuple(listed for name in shown for listed in shown[name]),
        more=left_out + sum(map(len, waiting.values())),
        unread=tuple(unread),
    )


def list_run(store: Store, run: Run, *, stage: str | None = None) -> Listing:
    """Return the artifacts of a run, also those that are gone."""
    order = _order(run.stages)
    chosen = [ref for ref in run.refs if stage in (ref.stage, None)]
    chosen.sort(key=lambda ref: order.index(ref.stage))
    unread: list[str] = []
    names = names_of(store, unread=unread)
    return Listing(artifacts=_look_at_all(store, chosen, names), more=0, unread=tuple(unread))


def list_artifact(store: Store, ref: ArtifactRef) -> Listing:
    """Return a list of one artifact."""
    unread: list[str] = []
    listed = _look_at(store, ref, names_of(store, unread=unread))
    return Listing(artifacts=(listed,), more=0, unread=tuple(unread))


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
    return list(in_parallel(lambda name: _read_tag(store, name), tag_names(store)))


def _next_batch(waiting: dict[str, list[str]], wanted: Mapping[str, int]) -> Iterator[ArtifactRef]:
    """Yield as many artifacts of each stage as are wanted, and remove them from `waiting`."""
    for stage, fingerprints in waiting.items():
        batch = fingerprints[: wanted[stage]]
        del fingerprints[: len(batch)]
        yield from (ArtifactRef(stage, fingerprint) for fingerprint in batch)


def _look_at_all(store: Store, refs: Iterable[ArtifactRef], names: Names) -> tuple[Listed, ...]:
    return tuple(in_parallel(lambda ref: _look_at(store, ref, names), refs))


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


def _read_tag(store: Store, name: str) -> Tagged:
    run, record, problem, is_damaged = "", None, "", False
    try:
        run = find_tag(store, name) or ""
        record = find_run(store, run) if run else None
        problem = "" if record else "its run has no record" if run else GONE
    except ArtifactError as error:
        problem, is_damaged = str(error), True
    return Tagged(name=name, run=run, record=record, problem=problem, is_damaged=is_damaged)


def _order(stages: Iterable[str]) -> list[str]:
    """Return the stages in the table's order, then those that the table no longer has."""
    table = [stage.name for stage in STAGES]
    return [*table, *sorted(set(stages) - set(table))]
