"""Find the garbage in a store, and the part of it that may be deleted today.

Garbage is what nothing in use reaches. It may be deleted if an earlier collection marked it,
`grace` seconds ago or longer, and it was not written since. What garbage that has to wait was made
from, waits with it: an artifact never outlives its inputs.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from flows.gc.inventory import Inventory, Kind, Piece, run_of
from flows.gc.reach import Edges, Reachable, Records, Referrers, Roots, Rules, find_roots
from flows.identity.ref import ArtifactRef

_OLDER: tuple[Kind, ...] = ("superseded", "divergent")


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The state of a store at one moment, as garbage collection sees it."""

    now: float  # unix seconds by the store's clock
    inventory: Inventory
    garbage: Mapping[str, Piece]  # by name
    deletable: Mapping[str, Piece]  # the part of it that may be deleted
    marks: Mapping[str, float]  # when each was first seen as garbage
    edges: Mapping[ArtifactRef, Edges]  # of artifacts that may be deleted


def make_survey(
    inventory: Inventory,
    referrers: Referrers,
    records: Records,
    rules: Rules,
    *,
    marks: Mapping[str, float],
    now: float,
) -> Survey:
    """Separate garbage from what is in use. `marks` are those of the last collection.

    `referrers` must have been read with `records` before the store was listed for the inventory.
    Raises ArtifactError, naming the record, if one is damaged: it might reach anything.
    """
    roots = find_roots(inventory, referrers, records, rules, now=now)
    reached = records.follow(roots.places)
    pieces = inventory.pieces.values()
    older = [p for p in pieces if p.kind in _OLDER and _is_needed(p, roots, rules, now=now)]
    records.add_older(older, reached)
    unfinished = {piece.place for piece in pieces if piece.kind == "checkpoints" and piece.place}
    done = records.edges(unfinished).keys()
    liveness = _Liveness(inventory, roots, reached, rules, now, done=done)
    garbage = {piece.name: piece for piece in pieces if not liveness.is_in_use(piece)}
    # A mark is void if the piece was written since: its time begins anew.
    first = {
        name: seen if (seen := marks.get(name)) is not None and piece.newest <= seen else now
        for name, piece in garbage.items()
    }
    due = {n: piece for n, piece in garbage.items() if n in marks and now - first[n] >= rules.grace}
    # Only pieces of an earlier mark are due: even with grace 0 it takes two collections.
    kept = _reached_by_waiting(garbage, due, roots, records)
    deletable = {name: piece for name, piece in due.items() if not _is_reached(piece, kept)}
    places = [p.place for p in deletable.values() if p.kind == "artifact" and p.place]
    return Survey(
        now=now,
        inventory=inventory,
        garbage=garbage,
        deletable=deletable,
        marks=first,
        edges=records.edges(places),
    )


def _reached_by_waiting(
    garbage: Mapping[str, Piece], due: Mapping[str, Piece], roots: Roots, records: Records
) -> Reachable:
    """Return what garbage that has to wait reaches."""
    waiting = [piece for name, piece in garbage.items() if name not in due]
    places = {p.place for p in waiting if p.kind == "artifact" and p.place}
    for piece in waiting:
        # A run's record that stays for now must not name artifacts that are gone.
        if piece.kind == "run record":
            places.update(roots.runs.get(run_of(piece), ()))
    reached = records.follow(places)
    records.add_older([piece for piece in waiting if piece.kind in _OLDER], reached)
    return reached


def _is_needed(piece: Piece, roots: Roots, rules: Rules, *, now: float) -> bool:
    """Return whether a manifest that was put aside may still be read."""
    is_young = now - piece.newest <= rules.grace
    return is_young or piece.place in roots.whole or piece.place in roots.unfinished


def _is_reached(piece: Piece, reached: Reachable) -> bool:
    """Return whether one of the reached artifacts needs a piece."""
    match piece.kind:
        case "artifact":
            return piece.place in reached.places
        case "files" | "logs":
            return piece.name in reached.attempts
        case "index entry":
            return piece.place in reached.found
        case "revocation":
            # Also without the artifact: what was made from it may have come from another store.
            return piece.place in reached.places or piece.place in reached.revocations
        case _:
            return False


class _Liveness:
    """The rules by which a piece is in use or garbage, one per kind."""

    def __init__(
        self,
        inventory: Inventory,
        roots: Roots,
        reached: Reachable,
        rules: Rules,
        now: float,
        *,
        done: Collection[ArtifactRef],  # artifacts that exist, of fingerprints with checkpoints
    ) -> None:
        self._inventory = inventory
        self._roots = roots
        self._reached = reached
        self._rules = rules
        self._now = now
        self._done = done
        self._special: dict[Kind, Callable[[Piece], bool]] = {
            "run record": lambda piece: run_of(piece) in roots.kept,
            "pin": lambda piece: now - piece.newest <= rules.keep,
            "superseded": lambda piece: _is_needed(piece, roots, rules, now=now),
            "divergent": lambda piece: _is_needed(piece, roots, rules, now=now),
            "checkpoints": self._may_be_continued,
            "lease": self._has_neighbours,
        }

    def is_in_use(self, piece: Piece) -> bool:
        """Return whether a piece stays."""
        # Leased or pinned: a process works under this fingerprint, so nothing of it is deleted.
        if piece.place in self._roots.whole:
            return True
        special = self._special.get(piece.kind)
        return special(piece) if special else _is_reached(piece, self._reached)

    def _may_be_continued(self, piece: Piece) -> bool:
        """Return whether checkpoints belong to a job without an artifact that may be resumed."""
        return piece.place not in self._done and self._now - piece.newest <= self._rules.keep

    def _has_neighbours(self, piece: Piece) -> bool:
        """Return whether anything but this lease lies under its fingerprint."""
        # The next owner's epoch follows from the record. Without it epochs begin at 1 again, which
        # is harmless only where nothing else names an epoch.
        assert piece.place is not None
        return len(self._inventory.places[piece.place]) > 1
