"""What lies in a store, as garbage collection sees it: pieces, each kept or deleted as a whole.

The files of one attempt are one piece, however many they are: an attempt is kept as long as any
manifest names a file of it. So what is remembered of a store of millions of objects is as large as
the number of its artifacts. Keys that no version of ours writes are nobody's garbage.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from flows.artifacts.pins import PINS
from infra.storage.base import ObjectInfo

Place: TypeAlias = tuple[str, str]  # stage, fingerprint
Kind: TypeAlias = Literal[
    "run record",
    "pin",
    "artifact",
    "superseded",
    "divergent",
    "files",
    "logs",
    "checkpoints",
    "revocation",
    "lease",
    "index entry",
]


_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_RECORDS: dict[str, Kind] = {
    "manifest.json": "artifact",
    "revoked.json": "revocation",
    "lease.json": "lease",
}
_OLDER: dict[str, Kind] = {"superseded": "superseded", "divergences": "divergent"}
_BYTES: dict[str, Kind] = {"files": "files", "logs": "logs"}
_OURS = ("refs", "gc")  # never garbage
_SMALL = 1 << 16  # bytes


@dataclass(kw_only=True, slots=True)
class Piece:
    """Objects that are kept or deleted together."""

    name: str  # a key; of many objects their prefix, ending with '/'
    kind: Kind
    place: Place | None  # None: of no artifact
    objects: int = 0
    size: int = 0  # bytes
    newest: float = 0.0  # when one of them was last written; unix seconds by the store's clock

    @property
    def stage(self) -> str:
        """The stage it belongs to, empty for what belongs to none."""
        return self.place[0] if self.place else ""


@dataclass(kw_only=True)
class Inventory:
    """Every piece of a store, by name."""

    pieces: dict[str, Piece] = field(default_factory=dict[str, Piece])
    places: dict[Place, list[Piece]] = field(default_factory=dict[Place, list[Piece]])
    unknown: int = 0  # objects that are not ours
    small: ObjectInfo | None = None  # an object that tells the store's time at little cost


def take_inventory(entries: Iterable[ObjectInfo]) -> Inventory:
    """Sort the objects of a whole store into pieces."""
    found = Inventory()
    for entry in entries:
        if entry.size < _SMALL and (found.small is None or entry.modified > found.small.modified):
            found.small = entry
        piece = _piece_of(entry.key)
        if piece is None:
            found.unknown += entry.key.partition("/")[0] not in _OURS
            continue
        known = found.pieces.get(piece.name)
        if known is None:
            known = found.pieces[piece.name] = piece
            if piece.place is not None and piece.kind != "index entry":
                found.places.setdefault(piece.place, []).append(piece)
        known.objects += 1
        known.size += entry.size
        known.newest = max(known.newest, entry.modified)
    return found


def attempt_of(key: str) -> str:
    """The piece that a file of an artifact lies in, by the key in its manifest."""
    piece = _piece_of(key)
    return piece.name if piece else key


def run_of(piece: Piece) -> str:
    """The id of the run that a run record is of."""
    return piece.name.removeprefix("runs/").removesuffix(".json")


def _piece_of(key: str) -> Piece | None:
    """The piece that an object belongs to, or None when it is not ours to judge."""
    parts = key.split("/")
    if parts[0] == "runs" and len(parts) == 2 and key.endswith(".json"):
        return Piece(name=key, kind="run record", place=None)
    if key.startswith(PINS) and len(parts) == 3:
        return Piece(name=key, kind="pin", place=None)
    if parts[0] == "index" and len(parts) == 3:
        place = (parts[1], parts[2].rpartition("-")[2])
        return Piece(name=key, kind="index entry", place=place) if _is_place(place) else None
    if len(parts) < 3 or not _is_place(place := (parts[0], parts[1])):
        return None
    if len(parts) == 3 and parts[2] in _RECORDS:
        return Piece(name=key, kind=_RECORDS[parts[2]], place=place)
    if len(parts) == 4 and parts[2] in _OLDER and key.endswith(".json"):
        return Piece(name=key, kind=_OLDER[parts[2]], place=place)
    if len(parts) > 4 and parts[2] in _BYTES:
        return Piece(name="/".join(parts[:4]) + "/", kind=_BYTES[parts[2]], place=place)
    if len(parts) > 4 and parts[2] == "checkpoints":
        return Piece(name="/".join(parts[:3]) + "/", kind="checkpoints", place=place)
    return None


def _is_place(place: Place) -> bool:
    return _FINGERPRINT.fullmatch(place[1]) is not None
