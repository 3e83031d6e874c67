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
from flows.gc.reach import Records, Rules, Survey, make_survey
from flows.gc.sweep import Deletion, Sweeper, Watch, clock
from flows.identity.record_types import find_record
from flows.identity.records import encode_record, repair_hint
from flows.leases.lease import Lease
from infra.parallel import THREADS
from infra.storage.base import ObjectInfo, Store
from nanochat_core.errors import ArtifactError

MARK = "gc/mark.json"
FORMAT = 1
UNFINISHED = 7 * 86400.0  # seconds after which an unfinished upload has no writer any more

_ENTRIES_A_BEAT = 500  # objects listed between two checks whether the lease is due for renewal


@dataclass(frozen=True, kw_only=True)
class _Mark:
    """The contents of gc/mark.json."""

    marks: dict[str, float]  # name of a piece -> when it was first seen as garbage


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The result of a collection."""

    survey: Survey
    swept: Deletion
    unfinished: int  # uploads that were aborted
    due: float | None  # when the next may be deleted; unix seconds by the store's clock


def make_claim() -> Lease:
    """Return a claim of this process as a collector."""
    # Without a boot a process never counts as dead: deletions that a killed collector had sent may
    # still arrive, so its leases expire by time alone.
    return replace(Lease.claim("gc"), boot=None)


def plan_collection(
    records: Records, rules: Rules, *, now: float | None = None, watch: Watch
) -> Survey:
    """Survey a whole store: what a collection would do. Writes nothing to the store.

    `now` is the time in unix seconds, by default of this machine's clock. Raises ArtifactError if a
    record is damaged, StoreError.
    """
    mark = find_record(records.store, MARK, _Mark, format=FORMAT, what="a mark of gc")
    try:
        records.read_referrers()
        inventory = take_inventory(_watched(records, watch))
        now = time.time() if now is None else now
        return make_survey(inventory, records, rules, marks=mark.marks if mark else {}, now=now)
    except ArtifactError as error:
        raise ArtifactError(
            f"garbage cannot be distinguished from what is in use: {error}",
            hint="nothing was deleted, because that record may name anything; "
            + (error.hint or repair_hint("delete it if no run needs it")),
        ) from error


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
        # The store's clock, which has just dated the lease: ours may be wrong.
        now = store.head(SWEEP.lease_key).modified
        records = Records(store, threads=threads, beat=sweeper.beat)
        survey = plan_collection(records, rules, now=now, watch=watch)
        # Before the sweep: a collection that is killed has marked, so the next can delete.
        _write_marks(store, survey.marks, sweeper)
        # Deletion begins with a fresh lease.
        sweeper.renew()
        swept = Deletion(records, survey, sweeper, claim, watch)
        swept.run()
        left = {n: seen for n, seen in survey.marks.items() if n not in swept.names}
        if swept.names:
            _write_marks(store, left, sweeper)
        unfinished = store.abort_stale_uploads(before=now - UNFINISHED)
    finally:
        sweeper.release()
    due = max(survey.now, min(left.values()) + rules.grace) if left else None
    return Collected(survey=survey, swept=swept, unfinished=unfinished, due=due)


def _watched(records: Records, watch: Watch) -> Iterator[ObjectInfo]:
    for count, entry in enumerate(records.store.list(""), 1):
        if count % _ENTRIES_A_BEAT == 0:
            records.beat()
            watch("objects listed", count)
        yield entry


def _write_marks(store: Store, marks: Mapping[str, float], sweeper: Sweeper) -> None:
    sweeper.check()
    store.put(MARK, encode_record({"marks": dict(sorted(marks.items()))}, format=FORMAT))
