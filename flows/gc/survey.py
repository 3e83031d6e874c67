"""Find the garbage in a store, and the part of it that may be deleted today.

Garbage is what nothing in use reaches. It may be deleted if an earlier collection marked it,
`grace` seconds ago or longer, and it was not written since. What garbage that has to wait was made
from, waits with it: an artifact never outlives its inputs.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from flows.gc.inventory import Inventory, Piece, run_of
from flows.gc.reach import Edges, Reachable, Records, Referrers, Roots, Rules, find_roots
from flows.identity.ref import ArtifactRef


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
    divergent = [
        p for p in pieces if p.kind == "divergent" and _is_needed(p, roots, rules, now=now)
    ]
    records.add_divergent(divergent, reached)
    unfinished = {piece.place for piece in pieces if piece.kind == "checkpoints" and piece.place}
    done = records.edges(unfinished).keys()
    is_in_use = _liveness(inventory, roots, reached, rules, now, done=done)
    garbage = {piece.name: piece for piece in pieces if not is_in_use(piece)}
    # A mark is void if the piece was written since: its time begins again.
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
            places.update(roots.runs.get(run_of(piece.name), ()))
    reached = records.follow(places)
    records.add_divergent([piece for piece in waiting if piece.kind == "divergent"], reached)
    return reached


def _is_needed(piece: Piece, roots: Roots, rules: Rules, *, now: float) -> bool:
    """Return whether a divergent manifest is young, or its fingerprint is being worked on."""
    return now - piece.newest <= rules.grace or piece.place in roots.whole


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


def _liveness(
    inventory: Inventory,
    roots: Roots,
    reached: Reachable,
    rules: Rules,
    now: float,
    *,
    done: Collection[ArtifactRef],  # artifacts that exist, of fingerprints with checkpoints
) -> Callable[[Piece], bool]:
    """Return the predicate of a piece in use: one rule per kind."""

    def is_in_use(piece: Piece) -> bool:
        # Leased or pinned: a process works under this fingerprint, so nothing of it is deleted.
        if piece.place in roots.whole:
            return True
        match piece.kind:
            case "run record":
                return run_of(piece.name) in roots.kept
            case "name":
                return (run := run_of(piece.name)) in roots.kept and run in roots.runs
            case "pin":
                return now - piece.newest <= rules.keep
            case "divergent":
                return _is_needed(piece, roots, rules, now=now)
            case "checkpoints":  # of an unfinished job, which may be resumed
                return piece.place not in done and now - piece.newest <= rules.keep
            case "lease":
                # The next owner's fencing token follows from the record. Without it tokens begin at
                # 1 again, which is harmless only where nothing else names one.
                assert piece.place is not None
                return len(inventory.places[piece.place]) > 1
            case _:
                return _is_reached(piece, reached)

    return is_in_use
