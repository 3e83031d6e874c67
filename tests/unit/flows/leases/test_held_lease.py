"""A lease that is held is renewed; one that is lost is noticed in time."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from flows.identity.ref import ArtifactRef
from flows.leases import held_lease
from flows.leases.held_lease import HeldLease, LeaseLost, LeaseTimings, try_acquire
from flows.leases.lease import LeaseHolder, find_holder
from infra.storage.base import VersionedObject
from infra.storage.local import LocalStore
from nanochat_core.errors import StoreError
from tests.support.flows.claims import claim
from tests.support.flows.waiting import wait_until

FINGERPRINT = "ab" * 32
REF = ArtifactRef("sft", FINGERPRINT)
KEY = f"sft/{FINGERPRINT}/lease.json"
QUICK = LeaseTimings(ttl=60.0, beat=0.02)
SHORT = dataclasses.replace(QUICK, ttl=0.2)
SECONDS = 100.0  # more than a busy machine needs


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    (tmp_path / "disk").mkdir()
    return LocalStore(tmp_path / "disk" / "store")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow its last heartbeat is, the block waits for it."""
    monkeypatch.setattr(held_lease, "MARGIN_SECONDS", SECONDS)


@contextlib.contextmanager
def held_by_us(store: Any, *, terms: LeaseTimings = QUICK) -> Generator[HeldLease]:
    lease = try_acquire(store, REF, claim("a"))
    assert isinstance(lease, HeldLease)
    with lease.keep(beat=terms.beat):
        yield lease


def take_over(store: LocalStore) -> None:
    """As if our lease had run out: another run takes it."""
    taken = try_acquire(store, REF, claim("b"), ttl=-1.0)
    assert not isinstance(taken, LeaseHolder)


def beats(store: LocalStore) -> int:
    holder = find_holder(store, REF)
    return holder.record.beat


@pytest.fixture
def unplug(tmp_path: Path) -> Callable[[], Callable[[], None]]:
    """Makes the store's disk go away; what it returns brings it back."""

    def unplug() -> Callable[[], None]:
        (tmp_path / "disk").rename(tmp_path / "away")
        return lambda: (tmp_path / "away").rename(tmp_path / "disk") and None

    return unplug


def test_a_held_lease_is_renewed_and_reports_how_far_the_job_is(store):
    with held_by_us(store) as lease:
        lease.note(step=3, total=9)
        wait_until(lambda: beats(store) > 3)
        holder = find_holder(store, REF)
        assert (holder.record.step, holder.record.total) == (3, 9)
        assert (lease.record.owner, lease.record.epoch) == ("owner-a", 1)
        lease.check()
        lease.raise_if_lost()


def test_a_renewal_that_was_too_late_is_written_again(store, monkeypatch):
    lease = try_acquire(store, REF, claim("a"))
    refusals = [False]  # as if another renewal of ours had been quicker
    put = store.put_if_same
    monkeypatch.setattr(
        store, "put_if_same", lambda *a, **b: refusals.pop() if refusals else put(*a, **b)
    )
    lease.renew()
    assert (refusals, beats(store)) == ([], lease.record.beat)


@pytest.mark.parametrize("how", ["well", "badly"])
def test_the_thread_ends_with_the_block_and_the_lease_is_released(store, how):
    before = threading.active_count()
    with contextlib.suppress(ValueError), held_by_us(store):
        assert threading.active_count() == before + 1
        if how == "badly":
            raise ValueError
    assert threading.active_count() == before
    assert b'"released": true' in store.get(KEY)


def test_a_store_that_is_away_for_longer_than_a_lease_lives_loses_nothing(store, unplug):
    with held_by_us(store, terms=SHORT) as lease:
        before = beats(store)
        plug_in = unplug()
        time.sleep(1.5 * SHORT.ttl)
        with pytest.raises(StoreError):
            lease.check()
        plug_in()
        wait_until(lambda: beats(store) > before)
        lease.check()
        assert not lease.lost


def test_answers_that_are_damaged_end_no_heartbeats(store, monkeypatch):
    get_stored, left = store.get_stored, []

    def damage(key: str) -> VersionedObject:
        stored = get_stored(key)
        return dataclasses.replace(stored, data=left.pop()) if left else stored

    monkeypatch.setattr(store, "get_stored", damage)
    with held_by_us(store) as lease:
        left.extend([b"<html>"] * 6)  # of two heartbeats: each asks three times
        wait_until(lambda: not left)
        before = beats(store)
        wait_until(lambda: beats(store) > before)
        lease.raise_if_lost()


def test_a_lease_that_was_taken_while_the_store_was_away_is_lost_at_the_next_contact(
    store, unplug, tmp_path
):
    with held_by_us(store) as lease:
        plug_in = unplug()
        take_over(LocalStore(tmp_path / "away" / "store"))
        time.sleep(5 * QUICK.beat)
        assert not lease.lost
        plug_in()
        wait_until(lambda: lease.lost)
        with pytest.raises(LeaseLost, match="lost its lease to run run-b"):
            lease.raise_if_lost()
        with pytest.raises(LeaseLost):
            lease.check()
    assert b'"released": false' in store.get(KEY)  # it is not ours to release


def test_a_store_that_hangs_does_not_delay_the_end_of_the_block(store, monkeypatch):
    monkeypatch.setattr(held_lease, "MARGIN_SECONDS", 0.1)
    answer, hangs = threading.Event(), threading.Event()
    get_stored = store.get_stored

    def hang(key: str) -> VersionedObject:
        hangs.set()
        answer.wait(SECONDS)
        return get_stored(key)

    with held_by_us(store) as lease:
        monkeypatch.setattr(store, "get_stored", hang)
        assert hangs.wait(SECONDS)
        assert not lease.lost
    assert b'"released": false' in store.get(KEY)
    answer.set()
