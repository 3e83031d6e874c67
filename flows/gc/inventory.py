"""Group a store's objects into pieces, which garbage collection keeps or deletes as a whole.

The files of one attempt are one piece, however many they are: an attempt stays as long as any
manifest names one of its files. So memory grows with the number of artifacts, not of objects. Keys
that no version of this program writes are counted and never deleted.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from flows.artifacts.pins import PINS
from flows.identity.ref import ArtifactRef
from infra.storage.base import ObjectInfo

Kind: TypeAlias = Literal[
    "run record",
    "name",
    "pin",
    "artifact",
    "divergent",
    "files",
    "logs",
    "checkpoints",
    "revocation",
    "lease",
    "index entry",
]

_PLACE = r"(?P<stage>(?!index/)[^/]+)/(?P<fingerprint>[0-9a-f]{64})"
# Of the keys of each kind; `name` is that of a piece of several objects.
_KEYS: dict[Kind, re.Pattern[str]] = {
    "run record": re.compile(r"runs/[^/]+\.json"),
    "name": re.compile(r"names/[^/]+/[^/]+"),
    "pin": re.compile(rf"{PINS}[^/]+"),
    "index entry": re.compile(r"index/(?P<stage>[^/]+)/([^/]*-)?(?P<fingerprint>[0-9a-f]{64})"),
    "artifact": re.compile(rf"{_PLACE}/manifest\.json"),
    "revocation": re.compile(rf"{_PLACE}/revoked\.json"),
    "lease": re.compile(rf"{_PLACE}/lease\.json"),
    "divergent": re.compile(rf"{_PLACE}/divergences/[^/]+\.json"),
    "files": re.compile(rf"(?P<name>{_PLACE}/files/[^/]+/).+"),
    "logs": re.compile(rf"(?P<name>{_PLACE}/logs/[^/]+/).+"),
    # All of a fingerprint are one piece: they are of use only to one unfinished job.
    "checkpoints": re.compile(rf"(?P<name>{_PLACE}/checkpoints/)[^/]+/.+"),
}
_OURS = re.compile(r"(refs|gc)/.*|[^/]+/[0-9a-f]{64}/redo\.json")  # never garbage


@dataclass(kw_only=True, slots=True)
class Piece:
    """A group of objects that stay or are deleted together."""

    name: str  # a key; for several objects their prefix, which ends with '/'
    kind: Kind
    place: ArtifactRef | None  # the artifact it belongs to; None: to none
    objects: int = 0
    size: int = 0  # bytes
    newest: float = 0.0  # when one of them was last written; unix seconds by the store's clock

    @property
    def stage(self) -> str:
        """Return the stage it belongs to, "" for what belongs to none."""
        return self.place.stage if self.place else ""


@dataclass(kw_only=True)
class Inventory:
    """All pieces of a store, by name and by artifact."""

    pieces: dict[str, Piece] = field(default_factory=dict[str, Piece])
    places: dict[ArtifactRef, list[Piece]] = field(default_factory=dict[ArtifactRef, list[Piece]])
    unknown: int = 0  # objects with keys that this program does not write


def take_inventory(entries: Iterable[ObjectInfo]) -> Inventory:
    """Sort the objects of a whole store into pieces."""
    found = Inventory()
    for entry in entries:
        piece = _piece_of(entry.key)
        if piece is None:
            # Tags, redo counters and the collector's own records are ours, and never garbage.
            found.unknown += not _OURS.fullmatch(entry.key)
            continue
        known = found.pieces.get(piece.name)
        if known is None:
            known = found.pieces[piece.name] = piece
            # The index has keys of its own; `places` has what lies under a fingerprint's prefix.
            if piece.place is not None and piece.kind != "index entry":
                found.places.setdefault(piece.place, []).append(piece)
        known.objects += 1
        known.size += entry.size
        known.newest = max(known.newest, entry.modified)
    return found


def attempt_of(key: str) -> str:
    """Return the name of the piece that a file belongs to, by the key in its manifest."""
    piece = _piece_of(key)
    return piece.name if piece else key


def run_of(key: str) -> str:
    """Return the id of the run whose record or name has this key."""
    folder, _, last = key.rpartition("/")
    return last.removesuffix(".json") if folder == "runs" else last.partition("-")[2]


def _piece_of(key: str) -> Piece | None:
    """Return the piece that an object belongs to. None means a key of another program."""
    # Anything that does not match exactly is left alone: what is deleted cannot be brought back.
    for kind, pattern in _KEYS.items():
        if match := pattern.fullmatch(key):
            parts = match.groupdict()
            place = ArtifactRef(parts["stage"], parts["fingerprint"]) if "stage" in parts else None
            return Piece(name=parts.get("name", key), kind=kind, place=place)
    return None
