"""Mark rebuilds, so that state of an unfinished job from before a rebuild is never resumed.

When an artifact is to be built again (`--force`, or it was revoked), a mark is put in the store
before anything else. The artifact stays in place until the new one replaces it; as long as the mark
names its build, the stage is unfinished work: a plan and every run build it. Every checkpoint in
the store and every work directory names the mark under which it was begun; a machine removes its
own work directory if that names another mark, or none.

{stage}/{fingerprint}/checkpoints/anew/run.json    the mark; removed with the checkpoints
{home}/work/{stage}/{fingerprint}/rebuild.json     the mark of a work directory
"""

import json
import shutil
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from flows.identity.manifest import Manifest
from flows.identity.record_types import read_record
from flows.identity.records import encode_record, find_document
from flows.identity.ref import ArtifactRef
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, StageError
from nanochat_core.job import write_json

FORMAT = 3
NONE = ""  # the id for state of a job that was never rebuilt
_NOTE = "rebuild.json"


@dataclass(frozen=True, kw_only=True)
class RebuildMark:
    """The mark of a rebuild that began and has not finished."""

    run: str  # id of the run that asked for it; its later attempts resume what it saved
    id: str
    replaces: str  # owner of the lease of the build that it replaces; "": there was no artifact

    def is_of(self, manifest: Manifest) -> bool:
        """Return whether this build is to be replaced, and was not replaced yet."""
        # Owner, not digest: the new build may have the same bytes.
        return self.replaces == manifest.provenance.owner


def mark_rebuild(
    store: Store, ref: ArtifactRef, *, run: str, replaces: Manifest | None
) -> RebuildMark:
    """Make the state of earlier jobs of a fingerprint stale on every machine. Raises StoreError."""
    owner = replaces.provenance.owner if replaces else ""
    mark = RebuildMark(run=run, id=uuid.uuid4().hex, replaces=owner)
    store.put(ref.rebuild_key, encode_record(asdict(mark), format=FORMAT))
    return mark


def find_rebuild_mark(store: Store, ref: ArtifactRef) -> RebuildMark | None:
    """Return the mark of the rebuild that is under way. None also means a damaged mark."""
    try:
        note = find_document(store, ref.rebuild_key, format=FORMAT)
        return None if note is None else read_record(RebuildMark, note, where="it", what="a mark")
    except ArtifactError:
        return None


def is_rebuilt(store: Store, manifest: Manifest) -> bool:
    """Return whether a rebuild of this artifact began and has not replaced it yet."""
    mark = find_rebuild_mark(store, manifest.ref)
    return mark is not None and mark.is_of(manifest)


def rebuild_of(directory: Path) -> str:
    """Return the id of the rebuild that a work directory belongs to, or NONE."""
    try:
        return str(json.loads((directory / _NOTE).read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, TypeError, KeyError):
        return NONE


def open_work(directory: Path, rebuild: str) -> None:
    """Make a work directory belong to this rebuild; remove it first if it belongs to another.

    Raises StageError if it cannot be removed: its state would be resumed as this rebuild's own.
    """
    if rebuild_of(directory) == rebuild:
        return
    # Removed before the mark is written: a crash in between leaves a directory of no rebuild, which
    # the next start removes.
    _remove(directory)
    if rebuild != NONE:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / _NOTE, {"id": rebuild})


def _remove(directory: Path) -> None:
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        why = error.strerror or error
        raise StageError(
            f"{directory} belongs to an earlier build and cannot be removed: {why}",
            hint=f"remove it, then run the same command again: rm -rf {directory}",
        ) from error
