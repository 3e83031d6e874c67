"""Nodes hear of each other in the store; a node 0 that lost its lease calls nobody together."""

from dataclasses import replace
from pathlib import Path

import pytest

from flows.build.messages import (
    MessagePrefix,
    NodeStatus,
    StartMessage,
    find_start,
    find_status,
    publish_start,
    publish_status,
)
from flows.gc.inventory import take_inventory
from flows.identity.ref import ArtifactRef
from flows.leases.lease import LeaseGrant, LeaseLost, check, release, try_acquire
from infra.storage.local import LocalStore
from nanochat_core.errors import ArtifactError
from tests.support.flows.claims import claim

TTL = 120.0


@pytest.fixture
def place(tmp_path: Path) -> MessagePrefix:
    return MessagePrefix(
        store=LocalStore(tmp_path / "store"), ref=ArtifactRef("pretrain", "ab" * 32)
    )


def acquire(place: MessagePrefix, name: str, *, ttl: float = TTL) -> LeaseGrant:
    held = try_acquire(place.store, place.ref, claim(name), ttl=ttl)
    assert isinstance(held, LeaseGrant)
    return held


def call_of(held: LeaseGrant, *, endpoint: str | None = None) -> StartMessage:
    return StartMessage(
        epoch=held.fencing_token,
        owner=held.owner,
        host="a",
        nodes=2,
        processes=8,
        step=200,
        commit="c0ffee",
        endpoint=endpoint,
    )


def test_a_call_is_heard_until_the_lease_is_given_back(place: MessagePrefix) -> None:
    held = acquire(place, "one")
    assert find_start(place, ttl=TTL)[0] is None
    for endpoint in (None, "10.0.0.1:4000"):
        call = call_of(held, endpoint=endpoint)
        publish_start(place, call, fence=lambda: check(place.store, held))
        assert find_start(place, ttl=TTL)[0] == call
    release(place.store, held)
    assert find_start(place, ttl=TTL) == (None, None)


def test_an_owner_that_lost_its_lease_calls_nobody_together(place: MessagePrefix) -> None:
    old = acquire(place, "old")
    publish_start(place, call_of(old), fence=lambda: None)
    new = acquire(place, "new", ttl=0.0)
    heard, holder = find_start(place, ttl=TTL)
    assert heard is None  # the old one's call counts no more
    assert holder is not None
    assert holder.host == "host-new"
    with pytest.raises(LeaseLost):
        publish_start(place, call_of(old), fence=lambda: check(place.store, old))
    publish_start(place, call_of(old, endpoint="late:1"), fence=lambda: None)  # it passed its fence
    assert find_start(place, ttl=TTL)[0] is None  # and is not believed
    publish_start(place, call_of(new), fence=lambda: check(place.store, new))
    with pytest.raises(LeaseLost, match="has started"):  # nor does it replace a newer one
        publish_start(place, call_of(old, endpoint="later:1"), fence=lambda: None)
    assert find_start(place, ttl=TTL)[0] == call_of(new)


def test_a_call_that_arrives_between_reading_and_writing_is_not_overwritten(
    place: MessagePrefix,
) -> None:
    old = acquire(place, "old")
    publish_start(place, call_of(old), fence=lambda: None)
    new = acquire(place, "new", ttl=0.0)
    raced: list[bool] = []

    def newer_one_calls() -> None:
        if not raced:
            raced.append(True)
            publish_start(place, call_of(new), fence=lambda: None)

    with pytest.raises(LeaseLost):
        publish_start(place, call_of(old, endpoint="late:1"), fence=newer_one_calls)
    assert find_start(place, ttl=TTL)[0] == call_of(new)


def test_an_answer_is_to_one_call(place: MessagePrefix) -> None:
    said = NodeStatus(epoch=3, node=1, host="b", state="ready", text="", cause="", who="x", beat=1)
    assert find_status(place, 1, epoch=3) is None
    publish_status(place, said)
    found = find_status(place, 1, epoch=3)
    assert found is not None
    assert found[0] == said
    assert 0 <= found[1] < 60
    assert find_status(place, 1, epoch=4) is None
    assert find_status(place, 2, epoch=3) is None
    publish_status(place, replace(said, epoch=4, beat=2))
    assert find_status(place, 1, epoch=3) is None


def test_a_record_that_is_none_is_named(place: MessagePrefix) -> None:
    held = acquire(place, "one")
    place.store.put(place.key("call"), b'{"format": 1}')
    with pytest.raises(ArtifactError, match=r"nodes/call\.json"):
        find_start(place, ttl=TTL)
    with pytest.raises(ArtifactError):
        publish_start(place, call_of(held), fence=lambda: None)


def test_what_nodes_write_is_collected_with_the_checkpoints(place: MessagePrefix) -> None:
    held = acquire(place, "one")
    publish_start(place, call_of(held), fence=lambda: None)
    said = NodeStatus(epoch=1, node=1, host="b", state="ready", text="", cause="", who="x", beat=1)
    publish_status(place, said)
    pieces = take_inventory(place.store.list("")).pieces.values()
    assert {(piece.kind, piece.objects) for piece in pieces} == {("lease", 1), ("checkpoints", 2)}
