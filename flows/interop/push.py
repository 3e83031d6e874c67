"""Copying artifacts from one store to another: verified while read, manifests last.

What is there already is not sent again, so an interrupted push is gone on with; whether its bytes
are right, and not only as many, is looked at when it is asked for. Files go first,
then the manifest with the very same bytes, by put-if-absent, then the run's record and the tag:
whoever looks on the other side finds a whole artifact or none.
"""

import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

from flows.artifacts.names import is_artifact, open_artifact, open_run
from flows.artifacts.pins import Pause, Tell, pin
from flows.artifacts.publish import commit, find_manifest
from flows.artifacts.revocations import FORMAT as REVOCATION
from flows.artifacts.revocations import (
    Revoked,
    ancestors_revoked,
    check_not_revoked,
    find_revoked,
    revocation_from,
    revocation_key,
)
from flows.artifacts.runs import Run, find_run, find_tag, point, write_run
from flows.artifacts.transfer import (
    damaged,
    fetch_file,
    fetch_or_fault,
    find_fault,
    in_parallel,
    scratch_name,
    transfer_each,
)
from flows.identity.fingerprint import short
from flows.identity.manifest import File, Manifest
from flows.identity.records import encode_record, find_stored
from flows.stages import STAGES
from infra.storage.base import ObjectNotFound, OnBytes, Store
from infra.storage.local import LocalStore
from nanochat_core.errors import ArtifactError

_THREADS = 16  # questions about what is there, at the same time

Item: TypeAlias = tuple[Manifest, File]
# Shows a transfer: is told what is done and with how many bytes, gives what is told of each of them
Watch: TypeAlias = Callable[[str, int], AbstractContextManager[OnBytes]]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What a person named: artifacts in the order of the table, and what makes names work."""

    manifests: tuple[Manifest, ...]
    runs: tuple[Run, ...]
    tags: dict[str, str]  # name -> id of a run
    left_out: tuple[str, ...]  # one line each: what is in a run's record and cannot be sent
    made_from: tuple[Revoked, ...]  # revoked artifacts that the chosen ones were made from
    revoked: tuple[Revoked, ...]  # those, and the revoked ones that are left out


@dataclass(frozen=True, kw_only=True)
class Lacking:
    """What another store lacks of some artifacts."""

    manifests: tuple[Manifest, ...]  # to be put, or there with these very bytes
    items: tuple[Item, ...]  # files to be sent, each once
    there: tuple[Item, ...]  # files that need not be sent
    damaged: int  # files to be sent that are there, but with other contents
    adopted: tuple[Manifest, ...]  # those of the other store that keep their place

    @property
    def size(self) -> int:
        """Bytes to be sent."""
        return sum(file.size for _, file in self.items)


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What became of a push."""

    lacking: Lacking  # what was sent
    adopted: tuple[Manifest, ...]  # artifacts of the other store that keep their place
    moved: dict[str, str]  # tag -> the run it stood for there before


def choose(source: Store, references: Iterable[str]) -> Chosen:
    """What `references` stand for: a run's artifacts and record, or one artifact and its run.

    Raises ConfigError or ArtifactError for a name that stands for nothing, and for a revoked
    artifact that was named itself.
    """
    manifests: dict[tuple[str, str], Manifest] = {}
    runs: dict[str, Run] = {}
    tags: dict[str, str] = {}
    left_out: list[str] = []
    taken_back: list[Revoked] = []
    for reference in references:
        run = _find_run(source, reference)
        if is_artifact(reference):
            manifest = open_artifact(source, reference)
            check_not_revoked(source, manifest)
            found = [manifest]
        else:
            assert run is not None, reference
            found = _artifacts_of(source, run, left_out, taken_back)
        manifests.update({(m.stage, m.fingerprint): m for m in found})
        if run is not None:
            runs[run.run] = run
            name = reference.partition("@")[2] or reference
            if "/" not in reference and find_tag(source, name) == run.run:
                tags[name] = run.run
    made_from = _find_made_from(source, manifests.values())
    order = {stage.name: place for place, stage in enumerate(STAGES)}
    return Chosen(
        manifests=tuple(sorted(manifests.values(), key=lambda m: order.get(m.stage, len(order)))),
        runs=tuple(runs.values()),
        tags=tags,
        left_out=tuple(left_out),
        made_from=made_from,
        revoked=tuple(dict.fromkeys([*made_from, *taken_back])),
    )


def push(
    source: Store,
    target: Store,
    chosen: Chosen,
    *,
    scratch: Path,
    watch: Watch,
    tell: Tell,
    pause: Pause,
    verify: bool = False,
) -> Pushed:
    """Send what `target` lacks of the chosen artifacts, their runs' records and tags.

    Revocations go first, so that nobody there takes what was made from a revoked artifact for good.
    An object of the right size counts as there, unless `verify` says to read it: then what differs
    is sent too. Files pass through `scratch` unless their store is on this machine; what an
    interrupted push left there is gone on with. Raises ArtifactError, naming the file, when the
    source's own bytes are damaged or gone, and StoreError.
    """
    if missing := target.missing_guarantees():
        tell(
            f"{target.url} can be a mirror that one process at a time writes to, and holds no "
            f"runs: it {' and '.join(missing)}"
        )
    with pin(target, _places(chosen.manifests), why="push", tell=tell, pause=pause):
        lacking = find_lacking(target, chosen.manifests)
        adopted = list(lacking.adopted)
        scratch.mkdir(parents=True, exist_ok=True)
        if verify:
            with watch("verify", sum(file.size for _, file in lacking.there)) as on_bytes:
                lacking = add_damaged(target, lacking, scratch=scratch, on_bytes=on_bytes)
        for revoked in chosen.revoked:
            _put_revocation(target, revoked)
        with watch("push", lacking.size) as on_bytes:
            for manifest in lacking.manifests:
                _send_files(source, target, manifest, lacking, scratch, on_bytes)
                published = commit(
                    target, manifest, attempt=uuid.uuid4().hex[:12], fence=lambda: None
                )
                adopted += [published.manifest] if published.adopted else []
        moved: dict[str, str] = {}
        for run in chosen.runs:
            _put_run(target, run)
        for name, run in chosen.tags.items():
            before = point(target, name, run)
            if before is not None and before != run:
                moved[name] = before
    return Pushed(lacking=lacking, adopted=tuple(adopted), moved=moved)


def find_lacking(target: Store, manifests: Sequence[Manifest]) -> Lacking:
    """What `target` lacks of these artifacts, by the sizes of its objects. Changes nothing."""
    known = in_parallel(
        lambda m: find_manifest(target, m.stage, m.fingerprint), manifests, threads=_THREADS
    )
    ours: list[Manifest] = []
    adopted: list[Manifest] = []
    for manifest, theirs in zip(manifests, known, strict=True):
        if theirs is None or theirs.to_json() == manifest.to_json():
            ours.append(manifest)
        else:
            adopted.append(theirs)
    wanted: dict[str, Item] = {}  # an object of an older artifact may be named by several
    for manifest in ours:
        for file in (*manifest.files, *manifest.logs):
            wanted.setdefault(file.key, (manifest, file))
    sizes = list(in_parallel(lambda i: _find_size(target, i[1]), wanted.values(), threads=_THREADS))
    found = list(zip(wanted.values(), sizes, strict=True))
    return Lacking(
        manifests=tuple(ours),
        items=tuple(item for item, size in found if size != item[1].size),
        there=tuple(item for item, size in found if size == item[1].size),
        damaged=sum(size not in (None, item[1].size) for item, size in found),
        adopted=tuple(adopted),
    )


def add_damaged(target: Store, lacking: Lacking, *, scratch: Path, on_bytes: OnBytes) -> Lacking:
    """Read all files that are there: those with other contents are lacking too.

    Raises ArtifactError when a file comes out otherwise each time, so that nobody can tell.
    """

    def find_fault_of(item: Item, on_bytes: OnBytes) -> str | None:
        return _find_fault_there(target, *item, scratch=scratch, on_bytes=on_bytes)

    faults = transfer_each(find_fault_of, lacking.there, on_bytes=on_bytes)
    found = list(zip(lacking.there, faults, strict=True))
    differing = [item for item, fault in found if fault is not None]
    return replace(
        lacking,
        items=(*lacking.items, *differing),
        there=tuple(item for item, fault in found if fault is None),
        damaged=lacking.damaged + len(differing),
    )


def _find_run(source: Store, reference: str) -> Run | None:
    """The run that is to be known on the other side too.

    None for an artifact named by its fingerprint whose run has left no record: that name works
    without one.
    """
    try:
        return open_run(source, reference)
    except ArtifactError:
        if "/" in reference:
            return None
        raise


def _artifacts_of(
    source: Store, run: Run, left_out: list[str], taken_back: list[Revoked]
) -> list[Manifest]:
    """The artifacts of a run that are there and valid; of the others one line each."""
    found: list[Manifest] = []
    for stage, fingerprint in run.stages.items():
        manifest = find_manifest(source, stage, fingerprint)
        if manifest is None:
            left_out.append(f"{stage}/{short(fingerprint)} is not in {source.url}")
        elif revoked := find_revoked(source, manifest):
            left_out.append(f"{manifest.name} was {revoked.revocation}")
            taken_back.append(revoked)
        else:
            found.append(manifest)
    if run.status == "running":
        left_out.append(f"{run.run} is still running: push it again when it has ended")
    return found


def _find_made_from(source: Store, manifests: Collection[Manifest]) -> tuple[Revoked, ...]:
    """Revoked artifacts that any of these was made from, each once."""
    inputs = {(n, i.fingerprint) for m in manifests for n, i in m.inputs.items()}
    # What another one was made from is looked at with that one.
    ends = [m for m in manifests if (m.stage, m.fingerprint) not in inputs]
    found = in_parallel(lambda m: ancestors_revoked(source, m), ends, threads=_THREADS)
    return tuple(dict.fromkeys(revoked for ancestors in found for revoked in ancestors))


def _places(manifests: Iterable[Manifest]) -> list[tuple[str, str]]:
    """Whatever these artifacts' files lie under: their own places, and those of older ones."""
    places = {(m.stage, m.fingerprint) for m in manifests}
    for manifest in manifests:
        for file in (*manifest.files, *manifest.logs):
            stage, _, rest = file.key.partition("/")
            places.add((stage, rest.partition("/")[0]))
    return sorted(places)


def _find_size(target: Store, file: File) -> int | None:
    """Bytes of the object that is there. Keys are never used for other bytes on purpose."""
    try:
        return target.head(file.key).size
    except ObjectNotFound:
        return None


def _find_fault_there(
    target: Store, manifest: Manifest, file: File, *, scratch: Path, on_bytes: OnBytes
) -> str | None:
    """What is wrong with the object that is there, all its bytes read; None: it is whole."""
    if isinstance(target, LocalStore):
        fault = find_fault(file, target.path_of(file.key))
        on_bytes(file.size)
        return fault
    path = scratch / f"there-{scratch_name(file)}"  # not the name of the source's copy
    try:
        return fetch_or_fault(target, manifest, file, path, on_bytes=on_bytes)
    finally:
        path.unlink(missing_ok=True)


def _send_files(
    source: Store,
    target: Store,
    manifest: Manifest,
    lacking: Lacking,
    scratch: Path,
    on_bytes: OnBytes,
) -> None:
    def send(file: File, on_bytes: OnBytes) -> None:
        _send(source, target, manifest, file, scratch=scratch, on_bytes=on_bytes)

    files = [file for owner, file in lacking.items if owner is manifest]
    transfer_each(send, files, on_bytes=on_bytes)


def _send(
    source: Store,
    target: Store,
    manifest: Manifest,
    file: File,
    *,
    scratch: Path,
    on_bytes: OnBytes,
) -> None:
    """Copy one object. A store on this machine is read in place, without a copy in between."""
    if isinstance(source, LocalStore):
        path = source.path_of(file.key)
        if (fault := find_fault(file, path)) is not None:
            raise damaged(source, manifest, file, fault)
        target.upload(file.key, path, on_bytes=on_bytes)
        return
    path = scratch / scratch_name(file)
    if find_fault(file, path) is not None:
        # Only what is uploaded counts; but here too it can be told to stop.
        fetch_file(source, manifest, file, path, on_bytes=lambda count: on_bytes(0))
    target.upload(file.key, path, on_bytes=on_bytes)
    path.unlink()


def _put_revocation(target: Store, revoked: Revoked) -> None:
    """Write a revocation, unless the same build is revoked there or the record is of theirs."""
    stage, fingerprint, ours = revoked.stage, revoked.fingerprint, revoked.revocation
    key = revocation_key(stage, fingerprint)
    data = encode_record(asdict(ours), format=REVOCATION)
    found = find_stored(target, key, format=REVOCATION)
    if found is None:
        target.put_if_absent(key, data)
        return
    tree, stored = found
    theirs = revocation_from(tree, where=f"{target.url}/{key}")
    if (theirs.owner, theirs.epoch) == (ours.owner, ours.epoch):
        return
    manifest = find_manifest(target, stage, fingerprint)
    if manifest is None or not theirs.is_of(manifest):
        target.put_if_same(key, data, version=stored.version)


def _put_run(target: Store, run: Run) -> None:
    """Write a run's record, unless the one that is there knows more."""
    theirs = find_run(target, run.run)
    if theirs is None or _knowledge(theirs) < _knowledge(run):
        write_run(target, run)


def _knowledge(run: Run) -> tuple[bool, str, int]:
    return run.ended is not None, run.ended or "", len(run.stages)
