"""Find the artifacts in use, by following manifests from what people and runs refer to.

A run's record names artifacts. An artifact names the artifacts it was made from, the attempts its
files lie in (which may be those of an older artifact), and the artifact it was accepted from. A
record that cannot be read might name anything, so it ends the search with an error.

Garbage is what nothing in use reaches. It may be deleted if an earlier collection marked it,
`grace` seconds ago or longer, and it was not written since. What garbage that has to wait was made
from, waits with it: an artifact never outlives its inputs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeVar

from flows.artifacts.pins import PINS, find_pin
from flows.artifacts.publish import find_manifest
from flows.artifacts.revocations import accepted_from
from flows.artifacts.runs import Run, find_run, find_tag, tag_names
from flows.gc.inventory import Inventory, Piece, attempt_of, run_of
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from flows.leases.lease import find_holder
from infra.parallel import THREADS, in_parallel
from infra.storage.base import Store

_Item = TypeVar("_Item", str, ArtifactRef)
_Result = TypeVar("_Result")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Retention times in seconds, by the store's clock."""

    keep: float  # for run records, pins and unfinished work, since their last write
    grace: float  # for new objects, and between the mark and the deletion of garbage


@dataclass(frozen=True, kw_only=True)
class Edges:
    """The artifacts and pieces that one manifest names."""

    inputs: tuple[ArtifactRef, ...]
    attempts: frozenset[str]  # names of the pieces that its files and logs belong to
    revocations: tuple[ArtifactRef, ...]  # whose revocation is this artifact's too

    @property
    def leads_to(self) -> tuple[ArtifactRef, ...]:
        """Return the artifacts that must outlive this one.

        These are its inputs, those whose files it shares, and those whose revocation is its own.
        """
        sharing = map(ArtifactRef.parse, self.attempts)
        return (*self.inputs, *sharing, *self.revocations)


@dataclass(kw_only=True)
class Reachable:
    """The artifacts and pieces that can be reached from some artifacts."""

    places: set[ArtifactRef] = field(default_factory=set[ArtifactRef])
    found: set[ArtifactRef] = field(default_factory=set[ArtifactRef])  # those of them that exist
    attempts: set[str] = field(default_factory=set[str])
    revocations: set[ArtifactRef] = field(default_factory=set[ArtifactRef])


@dataclass
class Records:
    """The records of a store, read in parallel, and each manifest only once.

    `read_referrers` is called before the store is listed, `find_roots` with the list.
    """

    store: Store
    _: KW_ONLY
    threads: int = THREADS
    beat: Callable[[], None] = lambda: None  # called often: reading takes long in a large store
    # Of manifests that were found, which do not change.
    manifests: dict[ArtifactRef, Edges] = field(default_factory=dict[ArtifactRef, Edges])
    # Set by `read_referrers`, expired ones too. No default: without them all would be garbage.
    runs: dict[str, Run] = field(init=False)  # by id
    tagged: frozenset[str] = field(init=False)  # ids of runs
    # When each was written, and what it names.
    pins: tuple[tuple[float, tuple[ArtifactRef, ...]], ...] = field(init=False)
    # Set by `find_roots`.
    kept: frozenset[str] = field(init=False)  # ids of the runs whose record stays
    whole: frozenset[ArtifactRef] = field(init=False)  # leased or pinned: whatever lies there stays

    def read(
        self, function: Callable[[Store, _Item], _Result | None], items: Iterable[_Item]
    ) -> dict[_Item, _Result]:
        """Return what `function` finds for each item, without those that are gone meanwhile."""
        found = self.each(lambda item: (item, function(self.store, item)), items)
        return {item: result for item, result in found if result is not None}

    def each(self, function: Callable[[_T], _Result], items: Iterable[_T]) -> Iterator[_Result]:
        """Yield what `function` returns for each item, in order, with a beat after each."""
        for result in in_parallel(function, items, threads=self.threads):
            self.beat()
            yield result

    def edges(self, places: Iterable[ArtifactRef]) -> dict[ArtifactRef, Edges]:
        """Return what the manifests of these artifacts name; those without one are left out."""
        wanted = sorted(places)
        fresh = [place for place in wanted if place not in self.manifests]
        self.manifests |= self.read(
            lambda s, ref: (m := find_manifest(s, ref)) and _edges_of(m), fresh
        )
        return {place: self.manifests[place] for place in wanted if place in self.manifests}

    def follow(self, places: Iterable[ArtifactRef]) -> Reachable:
        """Return all that can be reached from these artifacts."""
        reached = Reachable()
        # Breadth first: the manifests of one level are read in parallel.
        level = set(places)
        while level:
            reached.places |= level
            inputs: set[ArtifactRef] = set()
            for place, edges in self.edges(level).items():
                reached.found.add(place)
                reached.attempts |= edges.attempts
                reached.revocations.update(edges.revocations)
                inputs.update(edges.inputs)
            level = inputs - reached.places
        return reached

    def read_referrers(self) -> None:
        """Read the runs, tags and pins, and the manifests they lead to.

        Must be called before the store is listed. Raises ArtifactError, naming the record, if one
        is damaged.
        """
        # The order closes a race. A process removes its pin after it published: a pin that is gone
        # here belongs to a manifest that the later list has.
        written = {entry.key: entry.modified for entry in self.store.list(PINS)}
        pins = self.read(find_pin, written)
        self.pins = tuple((written[key], pin.refs) for key, pin in pins.items())
        # Not by names, which runs of an earlier version do not have.
        listed = [run_of(entry.key) for entry in self.store.list("runs/")]
        self.tagged = frozenset(self.read(find_tag, tag_names(self.store)).values())
        self.runs = self.read(find_run, dict.fromkeys([*listed, *sorted(self.tagged)]))
        # Called for its cache: the manifests are read now, before the list.
        self.follow({ref for each in (*self.runs.values(), *pins.values()) for ref in each.refs})

    def find_roots(self, inventory: Inventory, rules: Rules, *, now: float) -> set[ArtifactRef]:
        """Return the artifacts in use; what they were made from is in use too.

        They are those of the runs in `kept`, those in `whole`, and those just published. A run is
        kept if it was written lately or holds a lease, if a tag points at it, or if it is the
        newest finished one of its name. Raises ArtifactError if a record is damaged.
        """
        pieces = list(inventory.pieces.values())
        young = {p.name for p in pieces if now - p.newest <= rules.grace}
        # An older lease needs no request: it has expired, since the grace is an hour at least.
        leased = self.read(
            find_holder,
            [p.place for p in pieces if p.kind == "lease" and p.place and p.name in young],
        )
        pins = [places for written, places in self.pins if now - written <= rules.keep]
        self.whole = frozenset(leased).union(*pins)
        active = {holder.record.run for holder in leased.values()}
        active |= {
            run_of(p.name)
            for p in pieces
            if p.kind == "run record" and now - p.newest <= rules.keep
        }
        # Those that began after the others were read.
        self.runs |= self.read(find_run, sorted(active - self.runs.keys()))
        self.kept = self.tagged.union(active, _newest_finished(self.runs.values()))
        used = {ref for run in self.kept & self.runs.keys() for ref in self.runs[run].refs}
        # The run that made an artifact may not have recorded it yet.
        published = {
            p.place for p in pieces if p.kind == "artifact" and p.place and p.name in young
        }
        return used | published | self.whole


def _newest_finished(runs: Iterable[Run]) -> set[str]:
    """Return the runs that NAME and STAGE@NAME stand for: the first finished ones that have it."""
    newest: dict[tuple[str, str | None], str] = {}
    for run in sorted(runs, key=lambda run: (run.started, run.run), reverse=True):
        if run.status == "finished":
            for stage in (None, *run.stages):
                newest.setdefault((run.name, stage), run.run)
    return set(newest.values())


def _edges_of(manifest: Manifest) -> Edges:
    return Edges(
        inputs=manifest.input_refs,
        attempts=frozenset(attempt_of(file.key) for file in (*manifest.files, *manifest.logs)),
        revocations=accepted_from(manifest),
    )


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The state of a store at one moment: what a collection would mark and delete."""

    now: float  # unix seconds by the store's clock
    inventory: Inventory
    garbage: Mapping[str, Piece]  # by name
    deletable: Mapping[str, Piece]  # the part of it that may be deleted
    marks: Mapping[str, float]  # when each was first seen as garbage
    fresh: frozenset[str]  # garbage that no collection has marked yet
    edges: Mapping[ArtifactRef, Edges]  # of artifacts that may be deleted

    @property
    def is_empty(self) -> bool:
        """Return True if a collection would neither mark nor delete anything."""
        return not self.deletable and not self.fresh


def make_survey(
    inventory: Inventory, records: Records, rules: Rules, *, marks: Mapping[str, float], now: float
) -> Survey:
    """Separate garbage from what is in use. `marks` are those of the last collection.

    The referrers in `records` must have been read before the store was listed for the inventory.
    Raises ArtifactError, naming the record, if one is damaged: it might reach anything.
    """
    reached = records.follow(records.find_roots(inventory, rules, now=now))
    pieces = inventory.pieces.values()
    # Artifacts that exist, of fingerprints with checkpoints.
    done = records.edges({p.place for p in pieces if p.kind == "checkpoints" and p.place})

    def is_in_use(piece: Piece) -> bool:
        # Leased or pinned: a process works under this fingerprint, so nothing of it is deleted.
        if piece.place in records.whole:
            return True
        match piece.kind:
            case "run record":
                return run_of(piece.name) in records.kept
            case "name":
                return (run := run_of(piece.name)) in records.kept and run in records.runs
            case "pin":
                return now - piece.newest <= rules.keep
            case "checkpoints":  # of an unfinished job, which may be resumed
                return piece.place not in done and now - piece.newest <= rules.keep
            case "lease":
                # The next owner's fencing token follows from the record. Without it tokens begin at
                # 1 again, which is harmless only where nothing else names one.
                assert piece.place is not None
                return len(inventory.places[piece.place]) > 1
            case _:
                return _is_reached(piece, reached)

    garbage = {piece.name: piece for piece in pieces if not is_in_use(piece)}
    # A mark is void if the piece was written since: its time begins again.
    first = {
        name: seen if (seen := marks.get(name)) is not None and piece.newest <= seen else now
        for name, piece in garbage.items()
    }
    due = {name: piece for name, piece in garbage.items() if now - first[name] >= rules.grace}
    kept = _reached_by_waiting(garbage, due, records)
    deletable = {name: piece for name, piece in due.items() if not _is_reached(piece, kept)}
    places = [p.place for p in deletable.values() if p.kind == "artifact" and p.place]
    return Survey(
        now=now,
        inventory=inventory,
        garbage=garbage,
        deletable=deletable,
        marks=first,
        fresh=frozenset(garbage.keys() - marks.keys()),
        edges=records.edges(places),
    )


def _reached_by_waiting(
    garbage: Mapping[str, Piece], due: Mapping[str, Piece], records: Records
) -> Reachable:
    """Return what garbage that has to wait reaches."""
    waiting = [piece for name, piece in garbage.items() if name not in due]
    places = {p.place for p in waiting if p.kind == "artifact" and p.place}
    for piece in waiting:
        # A run's record that stays for now must not name artifacts that are gone.
        if piece.kind == "run record":
            run = records.runs.get(run_of(piece.name))
            places.update(run.refs if run else ())
    return records.follow(places)


def _is_reached(piece: Piece, reached: Reachable) -> bool:
    """Return whether one of the reached artifacts needs a piece."""
    match piece.kind:
        case "artifact":
            return piece.place in reached.places
        case "files" | "logs":
            return piece.name in reached.attempts
        case "index entry" | "divergent":  # evidence of what exists; files that are late go
            return piece.place in reached.found
        case "revocation":
            # Also without the artifact: what was made from it may have come from another store.
            return piece.place in reached.places or piece.place in reached.revocations
        case _:
            return False
