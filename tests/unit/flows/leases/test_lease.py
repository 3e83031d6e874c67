"""Who may take a lease, when, and that an owner which lost it learns so."""

import json
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.identity.records import encode_record
from flows.identity.ref import ArtifactRef
from flows.leases import lease
from flows.leases.lease import (
    TTL,
    Claimant,
    LeaseGrant,
    LeaseHolder,
    LeaseLost,
    check,
    find_holder,
    release,
    renew,
    try_acquire,
)
from infra.storage.local import LocalStore
from nanochat_core.errors import ArtifactError, StoreError
from tests.support.flows.claims import claim

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


def ask(store: Any, me: Claimant) -> LeaseGrant | LeaseHolder:
    return try_acquire(store, REF, me, ttl=TTL)


def take(store: Any, me: Claimant) -> LeaseGrant:
    held = ask(store, me)
    assert isinstance(held, LeaseGrant)
    return held


def record(store: LocalStore) -> dict[str, Any]:
    return json.loads(store.get(REF.lease_key))


def test_the_first_owner_has_fencing_token_one_and_says_who_it_is(store: LocalStore) -> None:
    held = take(store, claim("a"))

    assert (held.owner, held.fencing_token, held.ref) == ("owner-a", 1, REF)
    written = record(store)
    assert {name: written[name] for name in ("run", "host", "pid", "home", "since")} == {
        "run": "run-a",
        "host": "host-a",
        "pid": 7,
        "home": "home-a",
        "since": "2026-11-21T05:53:38Z",
    }
    assert not written["released"]


def test_a_lease_that_lives_is_left_to_its_owner_who_is_named(
    store: LocalStore, set_age: Callable[[float], None]
) -> None:
    held = take(store, claim("a"))
    renew(store, held, step=310, total=900)
    before = store.get(REF.lease_key)
    set_age(4)

    holder = ask(store, claim("b"))

    assert str(holder) == "run run-a on host host-a, step 310/900, heartbeat 4 s ago"
    assert store.get(REF.lease_key) == before


def test_a_job_without_steps_is_named_without_them(store: LocalStore) -> None:
    take(store, claim("a"))
    assert str(ask(store, claim("b"))) == "run run-a on host host-a, heartbeat 0 s ago"


def test_a_lease_that_was_given_back_is_taken_at_once(store: LocalStore) -> None:
    release(store, take(store, claim("a")))
    assert record(store)["released"]

    held = take(store, claim("b"))

    assert (held.owner, held.fencing_token) == ("owner-b", 2)
    assert not record(store)["released"]


def test_a_lease_is_taken_over_when_it_was_not_renewed_for_its_time_and_not_before(
    store: LocalStore, set_age: Callable[[float], None]
) -> None:
    take(store, claim("a"))
    set_age(TTL - 5)
    assert isinstance(ask(store, claim("b")), LeaseHolder)
    set_age(TTL + 1)

    assert take(store, claim("b")).fencing_token == 2


def test_the_lease_of_a_dead_process_of_our_home_is_taken_at_once(store: LocalStore) -> None:
    take(store, claim("a", home="ours"))
    assert isinstance(ask(store, claim("b", home="another")), LeaseHolder)

    assert take(store, claim("b", home="ours")).fencing_token == 2


def test_ages_are_by_the_stores_clock_and_never_by_ours(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(store, claim("a"))
    real = time.time
    for shift in (86400.0, -86400.0):
        monkeypatch.setattr(time, "time", lambda shift=shift: real() + shift)
        assert isinstance(ask(store, claim("b")), LeaseHolder)


def test_the_token_never_goes_back(store: LocalStore, set_age: Callable[[float], None]) -> None:
    chance = random.Random(1)
    tokens: list[int] = []
    for number in range(60):
        held = take(store, claim(str(number), home=chance.choice("xyz")))
        tokens.append(held.fencing_token)
        for _ in range(chance.randrange(3)):
            held = renew(store, held, step=1, total=2)
        if chance.random() < 0.5:
            release(store, held)
        else:
            set_age(TTL + 1)
    assert tokens == list(range(1, 61))


@pytest.mark.parametrize("left_by", ["nobody", "an owner that gave it back", "a silent owner"])
def test_of_many_that_want_it_at_once_one_gets_it(
    store: LocalStore, set_age: Callable[[float], None], left_by: str
) -> None:
    if left_by != "nobody":
        held = take(store, claim("a"))
        release(store, held) if "gave" in left_by else set_age(TTL + 1)
    first = 1 if left_by == "nobody" else 2
    results: list[LeaseGrant | LeaseHolder] = []
    barrier = threading.Barrier(8)

    def run(name: str) -> None:
        barrier.wait()
        results.append(ask(store, claim(name)))

    threads = [threading.Thread(target=run, args=(f"t{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    (winner,) = [result for result in results if isinstance(result, LeaseGrant)]
    assert winner.fencing_token == first
    losers = [result for result in results if isinstance(result, LeaseHolder)]
    assert {holder.record.owner for holder in losers} == {winner.owner}


def test_a_renewal_makes_the_lease_young_and_tells_how_far_the_job_is(
    store: LocalStore, set_age: Callable[[float], None]
) -> None:
    held = take(store, claim("a"))
    set_age(100)

    held = renew(store, held, step=5, total=9)

    holder = find_holder(store, REF)
    assert holder is not None
    assert holder.age < 10
    assert (holder.record.step, holder.record.total) == (5, 9)
    assert (held.record.step, held.fencing_token) == (5, 1)


def test_no_two_records_have_the_same_bytes_so_that_no_version_comes_back(
    store: LocalStore,
) -> None:
    seen: set[bytes] = set()
    for _ in range(2):
        held = take(store, claim("a"))
        seen.add(store.get(REF.lease_key))
        for _ in range(3):
            held = renew(store, held, step=1, total=2)
            seen.add(store.get(REF.lease_key))
        release(store, held)
        seen.add(store.get(REF.lease_key))
    assert len(seen) == 10


def taken_over(
    store: LocalStore, set_age: Callable[[float], None]
) -> tuple[LeaseGrant, LeaseGrant]:
    """An owner that fell silent, and the one after it."""
    old = take(store, claim("a"))
    set_age(TTL + 1)
    return old, take(store, claim("b"))


def test_an_owner_that_comes_back_late_finds_another_epoch(
    store: LocalStore, set_age: Callable[[float], None]
) -> None:
    old, new = taken_over(store, set_age)
    before = store.get(REF.lease_key)

    with pytest.raises(LeaseLost, match="lost its lease to run run-b on host host-b") as caught:
        renew(store, old, step=1, total=2)
    with pytest.raises(LeaseLost):
        check(store, old)
    release(store, old)

    assert "run the same command again" in (caught.value.hint or "")
    assert store.get(REF.lease_key) == before
    check(store, new)


def test_the_same_owner_in_another_epoch_has_lost_it_too(
    store: LocalStore, set_age: Callable[[float], None]
) -> None:
    old, new = taken_over(store, set_age)
    release(store, new)
    again = take(store, claim("a"))

    assert (again.owner, again.fencing_token) == (old.owner, 3)
    with pytest.raises(LeaseLost):
        renew(store, old, step=1, total=2)
    check(store, again)


def test_without_the_epoch_a_late_owner_would_renew_what_is_not_its_own(
    store: LocalStore, set_age: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: taking the check out is what the tests above notice."""
    old, _ = taken_over(store, set_age)
    monkeypatch.setattr(lease, "_is_of", lambda held, record: True)

    check(store, old)
    renew(store, old, step=1, total=2)

    assert record(store)["step"] == 1


def test_a_record_that_was_removed_or_given_back_is_a_lost_lease(store: LocalStore) -> None:
    held = take(store, claim("a"))
    release(store, held)
    with pytest.raises(LeaseLost, match="it was given back"):
        renew(store, held, step=1, total=2)
    assert record(store)["released"]

    store.delete(REF.lease_key)
    for use in (lambda: renew(store, held, step=1, total=2), lambda: check(store, held)):
        with pytest.raises(LeaseLost, match="its record was removed"):
            use()
    release(store, held)
    assert find_holder(store, REF) is None

    assert take(store, claim("b")).fencing_token == 1  # the record is gone, and with it the token
    with pytest.raises(LeaseLost, match="to run run-b"):
        check(store, held)


class Losing:
    """A store that does what it is asked, but whose next `lost` answers to writes are lost."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._answer(self._store.put_if_absent(key, data))

    def put_if_same(self, key: str, data: bytes, *, version: str) -> bool:
        return self._answer(self._store.put_if_same(key, data, version=version))

    def _answer(self, answer: bool) -> bool:
        if self.lost:
            self.lost -= 1
            raise StoreError("no answer")
        return answer


@pytest.mark.parametrize("earlier", [False, True])
def test_a_lease_that_is_ours_without_our_knowing_is_found_to_be(
    store: LocalStore, earlier: bool
) -> None:
    if earlier:
        release(store, take(store, claim("a")))
    losing = Losing(store)
    losing.lost = 1
    with pytest.raises(StoreError):
        ask(losing, claim("b"))
    assert isinstance(ask(store, claim("c")), LeaseHolder)

    held = take(losing, claim("b"))

    assert held.fencing_token == (2 if earlier else 1)
    renew(store, held, step=1, total=2)


def test_a_renewal_whose_answer_was_lost_does_no_harm(store: LocalStore) -> None:
    losing = Losing(store)
    held = take(losing, claim("a"))
    losing.lost = 1
    with pytest.raises(StoreError):
        renew(losing, held, step=1, total=9)

    held = renew(losing, held, step=2, total=9)

    assert (record(store)["step"], record(store)["beat"]) == (2, 3)
    losing.lost = 1
    with pytest.raises(StoreError):
        release(losing, held)
    release(losing, held)
    assert record(store)["released"]


def test_an_old_renewal_that_arrives_late_changes_nothing(
    store: LocalStore, set_age: Callable[[float], None]
) -> None:
    held = take(store, claim("a"))
    stored = store.get_stored(REF.lease_key)
    renew(store, held, step=1, total=2)
    late = replace(held.record, beat=2, step=9)
    set_age(TTL + 1)
    take(store, claim("b"))

    data = encode_record(vars(late), format=lease.FORMAT)

    assert not store.put_if_same(REF.lease_key, data, version=stored.version)
    assert record(store)["owner"] == "owner-b"


@pytest.mark.parametrize("ruin", ["cut", "flipped", "other fields", "other format"])
def test_a_record_that_cannot_be_read_is_an_error_and_not_free(
    store: LocalStore, ruin: str
) -> None:
    held = take(store, claim("a"))
    data = store.get(REF.lease_key)
    store.put(
        REF.lease_key,
        {
            "cut": data[:-20],
            "flipped": data.replace(b"run-a", b"run-b"),
            "other fields": encode_record({"owner": "a"}, format=lease.FORMAT),
            "other format": encode_record(vars(held.record), format=lease.FORMAT + 1),
        }[ruin],
    )

    for use in (
        lambda: ask(store, claim("b")),
        lambda: renew(store, held, step=1, total=2),
        lambda: check(store, held),
        lambda: find_holder(store, REF),
    ):
        with pytest.raises(ArtifactError, match=r"lease\.json is ") as caught:
            use()
        assert caught.value.hint


def test_only_a_lease_that_lives_has_a_holder(
    store: LocalStore, set_age: Callable[[float], None]
) -> None:
    def find(**options: Any) -> LeaseHolder | None:
        return find_holder(store, REF, **options)

    assert find() is None
    held = take(store, claim("a"))
    assert find() is not None
    assert find(dead="home-b") is not None
    assert find(dead="home-a") is None
    set_age(50)
    assert find() is not None
    assert find(ttl=40) is None
    set_age(TTL + 1)
    assert find() is None
    release(store, renew(store, held, step=1, total=2))
    assert find() is None
