"""Copy artifacts from one store to another: verified while read, manifests last.

Objects that the target has in the right size are not sent again, so an interrupted push resumes.
Files go first, then manifests, byte for byte the same, by put-if-absent, then the runs' records
and the tags: a reader of the target finds a complete artifact or none.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from flows.artifacts.names import is_artifact, open_artifact, open_run
from flows.artifacts.pins import Log, Pause, pin
from flows.artifacts.publish import commit, find_manifest, find_whole
from flows.artifacts.revocations import (
    Revoked,
    ancestors_revoked,
    check_not_revoked,
    find_revoked,
    put_revocation,
)
from flows.artifacts.runs import Run, find_run, find_tag, point, write_run
from flows.artifacts.transfer import (
    Watch,
    fetch_file,
    find_sizes,
    repair_of,
    scratch_name,
    transfer_each,
)
from flows.identity.manifest import File, Manifest
from flows.identity.redo import find_redo, raise_redo
from flows.identity.ref import ArtifactRef
from flows.stages import in_order
from infra.storage.base import OnBytes, Store
from nanochat_core.errors import ArtifactError

Item: TypeAlias = tuple[Manifest, File]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The artifacts to push, in the table's order, with the runs and tags that name them."""

    manifests: tuple[Manifest, ...]
    runs: tuple[Run, ...]
    tags: dict[str, str]  # name -> id of a run
    left_out: tuple[str, ...]  # one line for each artifact of a run that cannot be sent
    made_from: tuple[Revoked, ...]  # revoked artifacts upstream of the chosen ones
    revoked: tuple[Revoked, ...]  # those, and the revoked ones that are left out


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What a push sends, and what it finds in the other store."""

    manifests: tuple[Manifest, ...]  # put, or present with the same bytes
    items: tuple[Item, ...]  # files that are sent, each once
    there: tuple[Item, ...]  # files that the store has
    damaged: int  # files that are sent since the store has them in another size
    adopted: tuple[Manifest, ...]  # the other store's own of the same fingerprints: not replaced
    moved: dict[str, str] = field(default_factory=dict[str, str])  # tag -> the run it named before

    @property
    def size(self) -> int:
        """Return the number of bytes to send."""
        return sum(file.size for _, file in self.items)


def choose(source: Store, references: Iterable[str]) -> Chosen:
    """Resolve `references`: a run's artifacts and record, or one artifact and its run.

    Raises ConfigError or ArtifactError for an unknown name, and for a revoked artifact that is
    named itself.
    """
    # Dicts, since references may overlap: two runs that share artifacts, or a run and its tag.
    manifests: dict[ArtifactRef, Manifest] = {}
    runs: dict[str, Run] = {}
    tags: dict[str, str] = {}
    left_out: list[str] = []
    revoked_ones: list[Revoked] = []
    for reference in references:
        run: Run | None = None
        if is_artifact(reference):
            manifest = open_artifact(source, reference)
            check_not_revoked(source, manifest)
            found = [manifest]
            # The run of one that is named by its fingerprint may have no record.
            with contextlib.suppress(ArtifactError):
                run = open_run(source, reference)
        else:
            run = open_run(source, reference)
            found = _artifacts_of(source, run, left_out, revoked_ones)
        manifests.update({m.ref: m for m in found})
        if run is not None:
            runs[run.run] = run
            # sft@main and main name the tag main; stage/fingerprint names no tag.
            name = reference.partition("@")[2] or reference
            if "/" not in reference and find_tag(source, name) == run.run:
                tags[name] = run.run
    made_from = ancestors_revoked(source, *manifests.values())
    order = in_order(manifest.stage for manifest in manifests.values())
    return Chosen(
        manifests=tuple(sorted(manifests.values(), key=lambda m: order.index(m.stage))),
        runs=tuple(runs.values()),
        tags=tags,
        left_out=tuple(left_out),
        made_from=made_from,
        revoked=tuple(dict.fromkeys([*made_from, *revoked_ones])),
    )


def push(
    source: Store,
    target: Store,
    chosen: Chosen,
    *,
    scratch: Path,
    watch: Watch,
    log: Log,
    pause: Pause,
) -> Pushed:
    """Send what `target` lacks of the chosen artifacts, their runs' records and tags.

    An object of the right size counts as present. Files pass through the directory `scratch`, as
    hard links where the source is a directory on the same disk. Raises StoreError, and
    ArtifactError with the file's name if the source's own bytes are damaged or gone.
    """

    def send(item: Item, on_bytes: OnBytes) -> None:
        manifest, file = item
        path, hint = scratch / scratch_name(file), repair_of(source, manifest)
        # Progress counts uploaded bytes only. The callback is called with 0 here because it is also
        # where a transfer is cancelled.
        fetch_file(
            source, file, path, of=manifest.name, hint=hint, on_bytes=lambda count: on_bytes(0)
        )
        target.upload(file.key, path, on_bytes=on_bytes)
        path.unlink()

    target.check_conditions()
    # The pin keeps a garbage collection in the target from deleting files that no manifest names
    # yet, and those that are there already.
    with pin(target, _refs(chosen.manifests), why="push", log=log, pause=pause):
        lacking = _find_lacking(target, chosen.manifests)
        adopted = list(lacking.adopted)
        # Before the manifests: no reader of the target may see an artifact that was made from a
        # revoked one as valid.
        for revoked in chosen.revoked:
            _put_revocation(source, target, revoked)
        with watch(lacking.size) as on_bytes:
            transfer_each(send, lacking.items, on_bytes=on_bytes)
        for manifest in lacking.manifests:
            published = commit(target, manifest)
            adopted += [published.manifest] if published.adopted else []
            _put_redo(source, target, manifest)
        # Records and tags come last: they must not name artifacts that the target lacks.
        moved: dict[str, str] = {}
        for run in chosen.runs:
            _put_run(target, run)
        for name, run in chosen.tags.items():
            before = point(target, name, run)
            if before is not None and before != run:
                moved[name] = before
    return replace(lacking, adopted=tuple(adopted), moved=moved)


def _find_lacking(target: Store, manifests: Sequence[Manifest]) -> Pushed:
    """Return what `target` lacks of these artifacts, by the sizes of its objects. Reads only."""
    ours: list[Manifest] = []
    adopted: list[Manifest] = []
    for manifest in manifests:
        theirs = find_manifest(target, manifest.ref)
        # Equal bytes: an earlier push wrote it; its files are checked again all the same.
        if theirs is None or theirs.to_json() == manifest.to_json():
            ours.append(manifest)
        else:
            # Built in both stores, so the provenance differs at least: an artifact is immutable,
            # the target's stays.
            adopted.append(theirs)
    wanted: dict[str, Item] = {}  # by key: several manifests may name one object of an older one
    for manifest in ours:
        for file in (*manifest.files, *manifest.logs):
            wanted.setdefault(file.key, (manifest, file))
    sizes = find_sizes(target, [file for _, file in wanted.values()])
    found = list(zip(wanted.values(), sizes, strict=True))
    return Pushed(
        manifests=tuple(ours),
        items=tuple(item for item, size in found if size != item[1].size),
        there=tuple(item for item, size in found if size == item[1].size),
        damaged=sum(size not in (None, item[1].size) for item, size in found),
        adopted=tuple(adopted),
    )


def _artifacts_of(
    source: Store, run: Run, left_out: list[str], revoked_ones: list[Revoked]
) -> list[Manifest]:
    """Return a run's artifacts that exist and are valid; describe others in the two lists."""
    found: list[Manifest] = []
    for ref in run.refs:
        manifest = find_manifest(source, ref)
        if manifest is None:
            left_out.append(f"{ref.name} is not in {source.url}")
        elif revoked := find_revoked(source, manifest):
            left_out.append(f"{manifest.name} was {revoked.revocation}")
            revoked_ones.append(revoked)
        else:
            found.append(manifest)
    if run.status == "running":
        left_out.append(f"{run.run} is still running: push it again when it has ended")
    return found


def _refs(manifests: Iterable[Manifest]) -> list[ArtifactRef]:
    """Return these artifacts, and those under whose prefixes their files lie."""
    # Files may lie under an older artifact: accepted, or shared because the contents are equal.
    files = [file for m in manifests for file in (*m.files, *m.logs)]
    return sorted({m.ref for m in manifests} | {ArtifactRef.parse(file.key) for file in files})


def _put_revocation(source: Store, target: Store, revoked: Revoked) -> None:
    """Write a revocation, unless the target has made other contents of the same recipe."""
    ours, theirs = (find_whole(store, revoked.ref) for store in (source, target))
    if ours is None or theirs is None or ours.digest == theirs.digest:
        put_revocation(target, revoked.ref, revoked.revocation)


def _put_redo(source: Store, target: Store, manifest: Manifest) -> None:
    """Let plans of the target find an artifact that was asked for again."""
    number, recipe = manifest.identity.redo, manifest.identity.redone(0).ref
    while (known := find_redo(target, recipe)).number < number:
        raise_redo(target, recipe, known, replace(find_redo(source, recipe), number=number))


def _put_run(target: Store, run: Run) -> None:
    """Write a run's record, unless the target's is as new."""
    theirs = find_run(target, run.run)
    if theirs is None or _knowledge(theirs) < _knowledge(run):
        write_run(target, run)


def _knowledge(run: Run) -> tuple[bool, str, int]:
    """Return a sort key: ended runs last, then by the time of the end, then by artifacts."""
    return run.ended is not None, run.ended or "", len(run.stages)
