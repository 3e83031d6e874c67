"""Remember between collections what manifests name, so that each manifest is read once.

HOME/work/gc-{digest of the store's URL}.json has what each manifest named, and the etag of the
object that was read. An entry counts only while the store lists this etag. A file that is damaged,
or of another format, is ignored and written again; it may be deleted at any time.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Container, Mapping
from pathlib import Path

from flows.gc.inventory import Inventory
from flows.gc.reach import Edges, Known
from flows.identity.ref import ArtifactRef, short
from nanochat_core.job import move_into_place

# Raise it when `reach._edges_of` finds other edges in a manifest, or a row is written otherwise:
# a collection would miss what entries of before lack, and delete it.
FORMAT = 1


def cache_path(work: Path, url: str) -> Path:
    """Return the path of the cache for the store at `url`."""
    return work / f"gc-{short(hashlib.sha256(url.encode()).hexdigest())}.json"


def read_cache(path: Path | None) -> dict[ArtifactRef, Known]:
    """Return the entries of an earlier collection; none if the file is missing or damaged."""
    if path is None:
        return {}
    try:
        check, _, data = path.read_bytes().partition(b"\n")
    except OSError:
        return {}
    return _decode(data) if check == _check(data) else {}


def still_listed(
    known: Mapping[ArtifactRef, Known], inventory: Inventory
) -> dict[ArtifactRef, Known]:
    """Return the entries whose manifest is in the store as it was when it was read."""
    pieces = {ref: inventory.pieces.get(ref.manifest_key) for ref in known}
    etags = {ref: piece.etag for ref, piece in pieces.items() if piece and piece.etag}
    return {ref: entry for ref, entry in known.items() if entry.etag == etags.get(ref)}


def write_cache(
    path: Path | None,
    known: Mapping[ArtifactRef, Known],
    listed: Mapping[ArtifactRef, Known],
    *,
    leaving: Container[str],
) -> None:
    """Write the entries that are `listed`. No-op if they are `known` or the disk refuses.

    `leaving` has the names of pieces that are about to be deleted.
    """
    entries = {ref: e for ref, e in listed.items() if ref.manifest_key not in leaving}
    if path is not None and entries != known:
        data = _encode(entries)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(_check(data) + b"\n" + data)
            move_into_place(temporary, path)


def _check(data: bytes) -> bytes:
    return hashlib.sha256(b"%d %b" % (FORMAT, data)).hexdigest().encode()


def _encode(entries: Mapping[ArtifactRef, Known]) -> bytes:
    rows = [
        [
            ref.prefix,
            etag,
            [source.prefix for source in edges.inputs],
            sorted(edges.attempts),
            [source.prefix for source in edges.revocations],
        ]
        for ref, (etag, edges) in sorted(entries.items())
    ]
    return json.dumps(rows, separators=(",", ":")).encode()


def _decode(data: bytes) -> dict[ArtifactRef, Known]:
    return {
        ArtifactRef.parse(name): Known(
            etag,
            Edges(
                inputs=tuple(map(ArtifactRef.parse, inputs)),
                attempts=frozenset(attempts),
                revocations=tuple(map(ArtifactRef.parse, revocations)),
            ),
        )
        for name, etag, inputs, attempts, revocations in json.loads(data)
    }
