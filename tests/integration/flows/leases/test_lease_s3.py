"""Leases in an S3 store: other versions, other clocks, the same rules."""

import threading
import time

import pytest

from flows.identity.ref import ArtifactRef
from flows.leases.held_lease import HeldLease, LeaseTimings, hold_lease
from flows.leases.lease import (
    LeaseGrant,
    LeaseHolder,
    LeaseLost,
    check,
    find_holder,
    release,
    renew,
    try_acquire,
)
from infra.storage.base import Store
from tests.support.flows.claims import claim
from tests.support.flows.waiting import wait_until

FINGERPRINT = "ab" * 32


def ask(store: Store, name: str, *, ttl: float = 60.0) -> LeaseGrant | LeaseHolder:
    return try_acquire(store, ArtifactRef("sft", FINGERPRINT), claim(name), ttl=ttl)


def test_a_lease_goes_from_owner_to_owner(s3_store: Store) -> None:
    first = ask(s3_store, "a")
    assert isinstance(first, LeaseGrant)
    renew(s3_store, first, step=1, total=9)
    holder = ask(s3_store, "b")
    assert isinstance(holder, LeaseHolder)
    assert holder.record.step == 1
    release(s3_store, first)
    second = ask(s3_store, "b")
    assert isinstance(second, LeaseGrant)

    third = ask(s3_store, "c", ttl=-1.0)  # as if it had run out

    assert isinstance(third, LeaseGrant)
    assert (first.fencing_token, second.fencing_token, third.fencing_token) == (1, 2, 3)
    for use in (lambda: check(s3_store, second), lambda: renew(s3_store, second, step=1, total=2)):
        with pytest.raises(LeaseLost, match="to run run-c"):
            use()
    check(s3_store, third)


def test_a_lease_grows_old_by_the_stores_clock(s3_store: Store) -> None:
    ask(s3_store, "a")
    time.sleep(2.2)
    assert find_holder(s3_store, ArtifactRef("sft", FINGERPRINT), ttl=300.0) is not None
    assert find_holder(s3_store, ArtifactRef("sft", FINGERPRINT), ttl=0.9) is None
    assert isinstance(ask(s3_store, "b", ttl=0.9), LeaseGrant)


def test_of_many_that_want_it_at_once_one_gets_it_each_time(s3_store: Store) -> None:
    for round_number in range(1, 6):
        results: list[LeaseGrant | LeaseHolder] = []
        barrier = threading.Barrier(4)

        def run(
            name: str, barrier: threading.Barrier, results: list[LeaseGrant | LeaseHolder]
        ) -> None:
            barrier.wait()
            results.append(ask(s3_store, name))

        threads = [
            threading.Thread(target=run, args=(f"{round_number}-{number}", barrier, results))
            for number in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = [result for result in results if isinstance(result, LeaseGrant)]
        assert winner.fencing_token == round_number
        release(s3_store, winner)


def test_heartbeats_keep_it(s3_store: Store) -> None:
    terms = LeaseTimings(ttl=60.0, beat=0.1)
    stop = threading.Event()
    with hold_lease(
        s3_store, ArtifactRef("sft", FINGERPRINT), claim("a"), stop=stop, terms=terms
    ) as lease:
        assert isinstance(lease, HeldLease)

        def beats() -> int:
            holder = find_holder(s3_store, ArtifactRef("sft", FINGERPRINT))
            assert holder is not None
            return holder.record.beat

        wait_until(lambda: beats() > 3)
        assert not lease.lost.is_set()
    assert find_holder(s3_store, ArtifactRef("sft", FINGERPRINT)) is None
