"""A flow run's starts are counted as long as none gets further than those before."""

from dataclasses import replace
from typing import Any

import pytest

from flows.artifacts.runs import find_run, write_run
from flows.identity.fingerprint import Identity
from flows.plan.in_progress import Resume
from flows.plan.plan import StagePlan
from flows.plan.starts import Starts, read_starts
from flows.stages import PRETRAIN, ROWS
from infra.storage.base import StoreUnavailable
from tests.support.flows.house import make_run
from tests.support.flows.outage import Outage
from tests.support.reliability.memory_store import MemoryStore

FINGERPRINT = "ab" * 32


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def resume_at(step: int) -> StagePlan:
    identity = Identity(stage="pretrain", fingerprint=FINGERPRINT, preimage={})
    resume = Resume(step=step, total=200, in_store=True) if step else None
    return StagePlan(stage=PRETRAIN, state=">", identity=identity, resume=resume)


def start(store: MemoryStore, number: int, *, step: int = 0, **stages: str) -> Starts:
    """Begin a start that finds a checkpoint of `step`, and dies when it has made `stages`."""
    starts = read_starts(store, ["one"], number=number).add_plan("one", [resume_at(step)])
    write_run(store, replace(starts.record_in(make_run("one")), stages=stages))
    return starts


def test_starts_that_reach_nothing_are_counted(store: MemoryStore) -> None:
    assert [start(store, number).idle for number in range(1, 5)] == [0, 1, 2, 3]


def test_a_run_that_is_started_again_keeps_the_time_of_its_first_start(store: MemoryStore) -> None:
    start(store, 1)
    again = replace(make_run("one"), started="2031-01-01T00:00:00Z")
    assert read_starts(store, ["one"], number=2).record_in(again).started == make_run("one").started


def test_a_stage_that_a_start_has_built_begins_the_count_anew(store: MemoryStore) -> None:
    assert start(store, 1).idle == 0
    assert start(store, 2, rows="a" * 64).idle == 1
    assert start(store, 3, rows="a" * 64).idle == 0
    assert start(store, 4, rows="a" * 64).idle == 1  # it only found what is there
    assert start(store, 5, rows="b" * 64).idle == 2
    assert start(store, 6).idle == 0  # of another fingerprint


def test_a_later_checkpoint_begins_the_count_anew_and_the_same_one_does_not(
    store: MemoryStore,
) -> None:
    steps = (0, 50, 50, 40, 100, 100)
    idle = [start(store, number, step=step).idle for number, step in enumerate(steps, 1)]
    assert idle == [0, 0, 1, 2, 0, 1]


def test_what_is_there_when_the_first_start_begins_is_no_progress(store: MemoryStore) -> None:
    identity = Identity(stage="rows", fingerprint=FINGERPRINT, preimage={})
    plan = [StagePlan(stage=ROWS, state="=", identity=identity), resume_at(50)]
    starts = read_starts(store, ["one"], number=1).add_plan("one", plan)
    write_run(store, replace(starts.record_in(make_run("one")), stages={"rows": FINGERPRINT}))
    assert start(store, 2, step=50).idle == 1


def test_starts_that_die_before_their_record_do_not_find_the_same_progress_again(
    store: MemoryStore,
) -> None:
    start(store, 1, rows="a" * 64)
    idle = [read_starts(store, ["one"], number=number).idle for number in (2, 3, 4)]
    assert idle == [0, 1, 2]


def test_progress_of_one_run_of_a_series_counts_for_all(store: MemoryStore) -> None:
    starts = read_starts(store, ["one", "two"], number=1)
    for run in ("one", "two"):
        write_run(store, starts.record_in(make_run(run)))
    found = find_run(store, "two")
    assert found is not None
    write_run(store, replace(found, stages={"rows": "a" * 64}))
    assert read_starts(store, ["one", "two"], number=5).idle == 0
    assert read_starts(store, ["one", "two"], number=6).idle == 1


def test_what_exists_is_no_progress_of_a_run_of_a_sweep_that_has_not_begun(
    store: MemoryStore,
) -> None:
    shared = StagePlan(
        stage=ROWS, state="=", identity=Identity(stage="rows", fingerprint="c" * 64, preimage={})
    )
    idle: list[int] = []
    for number in range(1, 5):
        starts = read_starts(store, ["one", "two"], number=number)
        for run in ("one", "two"):
            starts = starts.add_plan(run, [shared])
        write_run(store, starts.record_in(make_run("one")))  # "two" waits for its result
        idle.append(starts.idle)
    assert idle == [0, 1, 2, 3]


def test_a_record_that_cannot_be_read_counts_as_none(store: MemoryStore) -> None:
    store.put("runs/one.json", b"{")
    assert read_starts(store, ["one"], number=4).idle == 3


def test_a_store_that_does_not_answer_is_no_missing_record(store: MemoryStore) -> None:
    start(store, 1, rows="a")
    away: Any = Outage(store, "get", "runs/one", seconds=3600)
    with pytest.raises(StoreUnavailable):
        read_starts(away, ["one"], number=2)
