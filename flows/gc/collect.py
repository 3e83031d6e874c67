"""Garbage collection: what nothing in use reaches is marked, and deleted a day later.

`nanochat gc` shows what a collection would do and writes nothing; `--apply` collects. A collection
writes down what is garbage now, in gc/mark.json, and deletes what an earlier one had written down
the grace ago or longer and is garbage still. It can be killed at any moment: the next one goes on.
"""

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from flows.artifacts.pins import SWEEP
from flows.artifacts.runs import timestamp
from flows.gc.inventory import take_inventory
from flows.gc.reach import Records, Rules, read_referrers
from flows.gc.survey import Survey, make_survey
from flows.gc.sweep import Sweeper, SweepResult, Watch, clock, sweep
from flows.identity.record_types import read_record
from flows.identity.records import encode_record, find_document, repair_hint
from flows.leases import lease
from infra.storage.base import ObjectInfo, ObjectNotFound, Store
from nanochat_core.errors import ArtifactError

MARK = "gc/mark.json"
FORMAT = 1
UNFINISHED = 7 * 86400.0  # seconds after which a half written object has no writer any more
THREADS = 16

_ENTRIES_A_BEAT = 500


@dataclass(frozen=True, kw_only=True)
class CollectionPlan:
    """What a collection would find and do."""

    survey: Survey
    fresh: frozenset[str]  # garbage that no collection has marked yet

    @property
    def exit_code(self) -> int:
        """0: a collection would change nothing. 2: it would mark or delete something."""
        return 2 if self.survey.deletable or self.fresh else 0


@dataclass(frozen=True, kw_only=True)
class _Mark:
    """What gc/mark.json says."""

    marks: dict[str, float]  # name of a piece -> when it was first seen as garbage


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What a collection did."""

    plan: CollectionPlan
    swept: SweepResult
    unfinished: int  # half written objects that were dropped
    due: float | None  # when what is marked now may go; unix seconds by the store's clock


def make_claim() -> lease.Claimant:
    """Who collects. It holds no lock of any home, so it gives itself one of its own."""
    return lease.Claimant(
        owner=uuid.uuid4().hex,
        run="gc",
        host=socket.gethostname(),
        pid=os.getpid(),
        home=uuid.uuid4().hex,
        since=timestamp(time.time()),
    )


def plan_collection(
    store: Store, rules: Rules, *, threads: int = THREADS, watch: Watch
) -> CollectionPlan:
    """Look at a whole store. Writes nothing.

    Raises ArtifactError when a record is damaged, StoreError.
    """
    marks = _find_marks(store)
    return _look(store, rules, marks, now=None, threads=threads, beat=lambda: None, watch=watch)


def collect(
    store: Store,
    rules: Rules,
    *,
    claim: Callable[[], lease.Claimant] = make_claim,
    threads: int = THREADS,
    clock: Callable[[], float] = clock,
    watch: Watch,
) -> Collected:
    """Mark garbage, and delete what was marked the grace ago.

    `claim` makes who we are, anew for each lease. Raises StageError when somebody collects already,
    LeaseLost, ArtifactError when a record is damaged, StoreError: nothing is lost by any of them.
    """
    sweeper = Sweeper(store, claim(), clock=clock)
    try:
        marks = _find_marks(store)
        now = _store_time(store, "/".join((*SWEEP, "lease.json")))
        plan = _look(store, rules, marks, now=now, threads=threads, beat=sweeper.beat, watch=watch)
        _write_marks(store, plan.survey.marks, sweeper)
        sweeper.renew()  # also tells whether another collector took a store that has no atomic swap
        swept = sweep(store, plan.survey, sweeper, claim=claim, threads=threads, watch=watch)
        left = {n: seen for n, seen in plan.survey.marks.items() if n not in swept.names}
        if swept.names:
            _write_marks(store, left, sweeper)
        unfinished = store.abort_stale_uploads(older_than=UNFINISHED)
    finally:
        sweeper.release()
    due = max(now, min(left.values()) + rules.grace) if left else None
    return Collected(plan=plan, swept=swept, unfinished=unfinished, due=due)


def _look(
    store: Store,
    rules: Rules,
    marks: Mapping[str, float],
    *,
    now: float | None,
    threads: int,
    beat: Callable[[], None],
    watch: Watch,
) -> CollectionPlan:
    records = Records(store, threads=threads, beat=beat)
    try:
        referrers = read_referrers(records)
        inventory = take_inventory(_watched(store.list(""), beat=beat, watch=watch))
        if now is None:
            now = _time_by(store, inventory.small)
        survey = make_survey(inventory, referrers, records, rules, marks=marks, now=now)
    except ArtifactError as error:
        raise ArtifactError(
            f"garbage cannot be told from what is in use: {error}",
            hint="nothing was deleted, because that record may name anything; "
            + (error.hint or repair_hint("delete it if nobody needs it")),
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
    """The store's clock, read off an object."""
    return store.head(key).modified + store.get_stored(key).age


def _time_by(store: Store, entry: ObjectInfo | None) -> float:
    """The store's clock, or a moment before; whatever it holds is new when it cannot be asked."""
    if entry is None:
        return 0.0
    try:
        return _store_time(store, entry.key)
    except ObjectNotFound:
        return entry.modified


def _find_marks(store: Store) -> dict[str, float]:
    tree = find_document(store, MARK, format=FORMAT)
    if tree is None:
        return {}
    return read_record(_Mark, tree, where=f"{store.url}/{MARK}", what="what gc writes").marks


def _write_marks(store: Store, marks: Mapping[str, float], sweeper: Sweeper) -> None:
    sweeper.check()
    store.put(MARK, encode_record({"marks": dict(sorted(marks.items()))}, format=FORMAT))
