"""Who may take a lease, when, and that an owner which lost it learns so."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.identity.records import encode_record
from flows.identity.ref import ArtifactRef
from flows.leases import lease
from flows.leases.held_lease import HeldLease, LeaseLost, try_acquire
from flows.leases.lease import TTL, Lease, LeaseHolder, find_holder
from flows.leases.process import Process
from infra.storage.local import LocalStore
from nanochat_core.errors import ArtifactError, StoreError
from tests.support.flows.claims import claim, dead_here

REF = ArtifactRef("pretrain", "ab" * 32)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def set_age(store: LocalStore, tmp_path: Path) -> Callable[[float], None]:
    """Let the record be this old, by the clock that stamps the store's files."""

    def set_age(seconds: float) -> None:
        written = time.time() - seconds
        os.utime(tmp_path / "store" / REF.lease_key, (written, written))

    return set_age


def ask(store: Any, me: Lease) -> HeldLease | LeaseHolder:
    return try_acquire(store, REF, me)


def take(store: Any, me: Lease) -> HeldLease:
    held = ask(store, me)
    assert isinstance(held, HeldLease)
    return held


def renew(held: HeldLease, *, step: int, total: int) -> None:
    held.note(step=step, total=total)
    held.renew()


def record(store: LocalStore) -> dict[str, Any]:
    return json.loads(store.get(REF.lease_key))


def test_the_first_owner_has_fencing_token_one_and_says_who_it_is(store):
    me = claim("a")
    assert take(store, me).record == me
    written = record(store)
    assert {name: written[name] for name in vars(me)} == vars(me)
    assert (me.epoch, me.released) == (1, False)


def test_a_lease_that_lives_is_left_to_its_owner_who_is_named(store, set_age):
    held = take(store, claim("a"))
    assert str(ask(store, claim("b"))) == "run run-a on host host-a, heartbeat 0 s ago"
    renew(held, step=310, total=900)
    before = store.get(REF.lease_key)
    set_age(4)

    holder = ask(store, claim("b"))

    assert str(holder) == "run run-a on host host-a, step 310/900, heartbeat 4 s ago"
    assert store.get(REF.lease_key) == before


# Seconds by which the record looks old: a clock was ahead when it was written, or is ahead now.
AGES = pytest.mark.parametrize("age", [-86400.0, -TTL, 0.0, TTL + 1, 86400.0])


@pytest.fixture
def clock() -> SimpleNamespace:
    """An observer's clock, which stands until it is moved."""
    return SimpleNamespace(now=1000.0)


@pytest.fixture
def observer(clock: SimpleNamespace) -> lease.Observer:
    return lease.Observer(lambda: clock.now)


@AGES
def test_a_lease_is_taken_over_when_one_saw_no_renewal_for_its_time_and_not_before(
    store, set_age, age, clock, observer
):
    def ask_again() -> HeldLease | LeaseHolder:
        return try_acquire(store, REF, claim("b"), ttl=TTL, observer=observer)

    held = take(store, claim("a"))
    set_age(age)
    assert isinstance(ask_again(), LeaseHolder)
    clock.now += TTL - 1
    renew(held, step=1, total=2)
    set_age(age)
    holder = ask_again()
    assert isinstance(holder, LeaseHolder)
    assert holder.silence == 0
    clock.now += TTL
    holder = ask_again()
    assert isinstance(holder, LeaseHolder)
    assert holder.silence == TTL
    clock.now += 1

    taken = ask_again()

    assert isinstance(taken, HeldLease)
    assert taken.record.epoch == 2
    with pytest.raises(LeaseLost):
        renew(held, step=2, total=2)


def test_a_new_owner_is_observed_anew(store, clock, observer):
    held = take(store, claim("a"))
    try_acquire(store, REF, claim("c"), ttl=TTL, observer=observer)
    clock.now += TTL - 1
    held.release()
    take(store, claim("b"))
    clock.now += 2

    # The answer is counted from when it came, however long the request took.
    assert isinstance(try_acquire(store, REF, claim("c"), ttl=TTL, observer=observer), LeaseHolder)
    clock.now += TTL
    assert find_holder(store, REF, observer=observer) is not None
    clock.now += 1
    assert find_holder(store, REF, observer=observer) is None


def test_a_slow_answer_does_not_make_a_lease_older(store, clock, observer, monkeypatch):
    take(store, claim("a"))
    get_stored = store.get_stored

    def get_slowly(key: str) -> Any:
        found = get_stored(key)
        clock.now += TTL
        return found

    monkeypatch.setattr(store, "get_stored", get_slowly)
    for _ in range(2):
        found = try_acquire(store, REF, claim("b"), ttl=TTL, observer=observer)
        assert isinstance(found, LeaseHolder)
        assert found.silence == 0


def test_garbage_collection_takes_a_lease_that_is_hours_old(store, set_age):
    take(store, claim("a"))
    for age, kind in ((TTL + 1, LeaseHolder), (3000.0, LeaseHolder), (3601.0, HeldLease)):
        set_age(age)
        found = try_acquire(store, REF, claim("gc"), ttl=3600.0)
        assert isinstance(found, kind), age


def test_the_lease_of_a_dead_process_is_taken_at_once(store):
    take(store, claim("a", **vars(Process.this())))
    assert isinstance(ask(store, claim("b")), LeaseHolder)
    assert find_holder(store, REF) is not None

    store.delete(REF.lease_key)
    take(store, claim("a", **dead_here()))

    assert find_holder(store, REF) is None
    assert take(store, claim("b")).record.epoch == 2


def test_the_same_owner_in_another_epoch_has_lost_it_too(store):
    old = take(store, claim("a"))
    old.release()
    take(store, claim("b")).release()
    again = take(store, claim("a"))

    assert (again.record.owner, again.record.epoch) == (old.record.owner, 3)
    with pytest.raises(LeaseLost, match="lost its lease to run run-a"):
        renew(old, step=1, total=2)
    again.check()


def test_a_record_that_was_removed_or_given_back_is_a_lost_lease(store):
    held = take(store, claim("a"))
    held.release()
    with pytest.raises(LeaseLost, match="it was released"):
        renew(held, step=1, total=2)
    assert record(store)["released"]

    store.delete(REF.lease_key)
    for use in (lambda: renew(held, step=1, total=2), lambda: held.check()):
        with pytest.raises(LeaseLost, match="its record was removed"):
            use()
    held.release()
    assert find_holder(store, REF) is None

    assert take(store, claim("b")).record.epoch == 1  # the record is gone, and with it the token
    with pytest.raises(LeaseLost, match="to run run-b"):
        held.check()


def lose_an_answer(store: LocalStore, verb: str) -> None:
    """Have the store carry out the next request of this verb, and answer with an error."""
    real = getattr(store, verb)

    def carry_out(*words: Any, **options: Any) -> None:
        setattr(store, verb, real)
        real(*words, **options)
        raise StoreError("no answer")

    setattr(store, verb, carry_out)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_lease_that_is_ours_without_our_knowing_is_found_to_be(store, earlier):
    if earlier:
        take(store, claim("a")).release()
    lose_an_answer(store, "put_if_same" if earlier else "put_if_absent")
    with pytest.raises(StoreError):
        ask(store, claim("b"))
    assert isinstance(ask(store, claim("c")), LeaseHolder)

    held = take(store, claim("b"))

    assert isinstance(ask(store, claim("c")), LeaseHolder)
    renew(held, step=1, total=2)


def test_a_renewal_whose_answer_was_lost_does_no_harm(store):
    held = take(store, claim("a"))
    lose_an_answer(store, "put_if_same")
    with pytest.raises(StoreError):
        renew(held, step=1, total=9)

    renew(held, step=2, total=9)

    assert (record(store)["step"], record(store)["beat"]) == (2, 3)
    lose_an_answer(store, "put_if_same")
    with pytest.raises(StoreError):
        held.release()
    held.release()
    assert record(store)["released"]


@pytest.mark.parametrize("ruin", ["cut", "flipped", "other fields", "other format"])
def test_a_record_that_cannot_be_read_is_an_error_and_not_free(store, ruin):
    held = take(store, claim("a"))
    data = store.get(REF.lease_key)
    store.put(
        REF.lease_key,
        {
            "cut": data[:-20],
            "flipped": data.replace(b"run-a", b"run-b"),
            "other fields": encode_record({"owner": "a"}, format=lease.FORMAT),
            "other format": encode_record(asdict(held.record), format=lease.FORMAT + 1),
        }[ruin],
    )

    for use in (
        lambda: ask(store, claim("b")),
        lambda: renew(held, step=1, total=2),
        lambda: held.check(),
        lambda: find_holder(store, REF),
    ):
        with pytest.raises(ArtifactError, match=r"lease\.json is ") as caught:
            use()
        assert caught.value.hint


def test_only_a_lease_that_lives_has_a_holder(store, set_age):
    def find(**options: Any) -> LeaseHolder | None:
        return find_holder(store, REF, **options)

    assert find() is None
    held = take(store, claim("a"))
    assert find() is not None
    set_age(50)
    assert find() is not None
    assert find(ttl=40) is None
    set_age(TTL + 1)
    assert find() is None
    held.release()
    assert find() is None
