"""Collect garbage: mark what nothing in use reaches, and delete what was marked a day before.

`nanochat gc` shows what a collection would do and writes nothing; `--apply` collects. A collection
records what is garbage now in gc/mark.json, and deletes what an earlier one had recorded `grace`
seconds ago or longer and is still garbage. It can be killed at any moment: the next one resumes.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from flows.artifacts.pins import SWEEP
from flows.gc.inventory import take_inventory
from flows.gc.reach import Records, Rules, read_referrers
from flows.gc.survey import Survey, make_survey
from flows.gc.sweep import Sweeper, SweepResult, Watch, clock, sweep
from flows.identity.record_types import read_record
from flows.identity.records import encode_record, find_document, repair_hint
from flows.leases.lease import Lease
from infra.parallel import THREADS
from infra.storage.base import ObjectInfo, Store
from nanochat_core.errors import ArtifactError

MARK = "gc/mark.json"
FORMAT = 1
UNFINISHED = 7 * 86400.0  # seconds after which an unfinished upload has no writer any more

_ENTRIES_A_BEAT = 500  # objects listed between two checks whether the lease is due for renewal


@dataclass(frozen=True, kw_only=True)
class CollectionPlan:
    """The result of a survey: what a collection would mark and delete."""

    survey: Survey
    fresh: frozenset[str]  # garbage that no collection has marked yet

    @property
    def is_empty(self) -> bool:
        """Return True if a collection would neither mark nor delete anything."""
        return not self.survey.deletable and not self.fresh


@dataclass(frozen=True, kw_only=True)
class _Mark:
    """The contents of gc/mark.json."""

    marks: dict[str, float]  # name of a piece -> when it was first seen as garbage


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The result of a collection."""

    plan: CollectionPlan
    swept: SweepResult
    unfinished: int  # uploads that were aborted
    due: float | None  # when the next may be deleted; unix seconds by the store's clock


def make_claim() -> Lease:
    """Return a claim of this process as a collector."""
    # Without a boot a process never counts as dead: deletions that a killed collector had sent may
    # still arrive, so its leases expire by time alone.
    return replace(Lease.claim("gc"), boot=None)


def plan_collection(
    store: Store,
    rules: Rules,
    *,
    threads: int = THREADS,
    clock: Callable[[], float] = time.time,
    watch: Watch,
) -> CollectionPlan:
    """Survey a whole store and return what a collection would do. Writes nothing to the store.

    Ages are by this machine's clock: `clock` returns unix seconds. Raises ArtifactError if a record
    is damaged, StoreError.
    """
    return _look(store, rules, now=clock(), beat=lambda: None, threads=threads, watch=watch)


def collect(
    store: Store,
    rules: Rules,
    *,
    claim: Callable[[], Lease] = make_claim,
    threads: int = THREADS,
    clock: Callable[[], float] = clock,
    pause: Callable[[float], None] = time.sleep,
    watch: Watch,
    log: Callable[[str], None],
) -> Collected:
    """Mark garbage, and delete what was marked `rules.grace` seconds ago or longer.

    `claim` returns a new claim for each lease. `log` gets a line if this process has to wait
    for another collector, which may be dead. Raises StageError if another process collects,
    LeaseLost, ArtifactError if a record is damaged, StoreError. After each the store is sound.
    """
    # The lease comes before anything is read. A process that records a use and finds no lease was
    # early enough to be seen; one that finds the lease waits (flows/artifacts/pins.py).
    sweeper = Sweeper(store, claim(), clock=clock, pause=pause, log=log)
    try:
        # The store's clock: a wrong one of this machine would delete too early.
        now = _store_time(store, SWEEP.lease_key)
        plan = _look(store, rules, now=now, beat=sweeper.beat, threads=threads, watch=watch)
        # Before the sweep: a collection that is killed has marked, so the next can delete.
        _write_marks(store, plan.survey.marks, sweeper)
        # Deletion begins with a fresh lease.
        sweeper.renew()
        swept = sweep(store, plan.survey, sweeper, claim=claim, threads=threads, watch=watch)
        left = {n: seen for n, seen in plan.survey.marks.items() if n not in swept.names}
        if swept.names:
            _write_marks(store, left, sweeper)
        unfinished = store.abort_stale_uploads(older_than=UNFINISHED)
    finally:
        sweeper.release()
    due = max(plan.survey.now, min(left.values()) + rules.grace) if left else None
    return Collected(plan=plan, swept=swept, unfinished=unfinished, due=due)


def _look(
    store: Store,
    rules: Rules,
    *,
    now: float,
    beat: Callable[[], None],
    threads: int,
    watch: Watch,
) -> CollectionPlan:
    marks = _find_marks(store)
    try:
        records = Records(store, threads=threads, beat=beat)
        # The referrers before the list: see read_referrers.
        referrers = read_referrers(records)
        inventory = take_inventory(_watched(store.list(""), beat=beat, watch=watch))
        survey = make_survey(inventory, referrers, records, rules, marks=marks, now=now)
    except ArtifactError as error:
        raise ArtifactError(
            f"garbage cannot be distinguished from what is in use: {error}",
            hint="nothing was deleted, because that record may name anything; "
            + (error.hint or repair_hint("delete it if no run needs it")),
        ) from error
    return CollectionPlan(survey=survey, fresh=frozenset(survey.garbage.keys() - marks.keys()))


def _watched(
    entries: Iterator[ObjectInfo], *, beat: Callable[[], None], watch: Watch
) -> Iterator[ObjectInfo]:
    for count, entry in enumerate(entries, 1):
        if count % _ENTRIES_A_BEAT == 0:
            beat()
            watch("objects listed", count)
        yield entry


def _store_time(store: Store, key: str) -> float:
    """Return the store's clock in unix seconds, read from an object."""
    return store.head(key).modified + store.get_stored(key).age


def _find_marks(store: Store) -> dict[str, float]:
    tree = find_document(store, MARK, format=FORMAT)
    if tree is None:
        return {}
    return read_record(_Mark, tree, where=f"{store.url}/{MARK}", what="a mark of gc").marks


def _write_marks(store: Store, marks: Mapping[str, float], sweeper: Sweeper) -> None:
    sweeper.check()
    store.put(MARK, encode_record({"marks": dict(sorted(marks.items()))}, format=FORMAT))
