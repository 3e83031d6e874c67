"""The fake S3 server does to requests what each kind of fault says, and nothing else."""

import contextlib
import http.client
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.infra.storage.fake_s3 import FakeS3
from tests.support.infra.storage.misbehaviour import NETWORK_FAULTS, Fault, Kind, Storm

OLD, NEW = b"old contents", b"new contents, longer"


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    """A server with OLD at the key a."""
    fake = FakeS3()
    ask(fake, "PUT", "a", OLD)
    fake.arm()
    yield fake
    fake.stop()


def ask(
    fake: FakeS3, method: str, key: str, body: bytes | None = None, *, seconds: float = 60
) -> tuple[int, bytes]:
    """Send one request over a connection of its own; return status and body of the answer."""
    host = fake.endpoint.removeprefix("http://")
    with contextlib.closing(http.client.HTTPConnection(host, timeout=seconds)) as connection:
        connection.request(method, f"/fake/{key}", body=body)
        answer = connection.getresponse()
        return answer.status, answer.read()


@pytest.mark.parametrize(
    ("kind", "error", "is_done"),
    [
        (Kind.RESET, ConnectionResetError, False),
        (Kind.RESET_REQUEST, ConnectionResetError, False),
        (Kind.LOSE, http.client.RemoteDisconnected, True),
        (Kind.HANG, TimeoutError, True),
        (Kind.BLACKHOLE, TimeoutError, False),
        (Kind.RESET_ANSWER, (ConnectionResetError, http.client.HTTPException), True),
    ],
)
def test_a_fault_of_the_connection_leaves_the_client_without_an_answer(
    fake: FakeS3, kind: Kind, error: Any, *, is_done: bool
) -> None:
    fake.arm(Fault(kind=kind, times=1))
    with pytest.raises(error):
        ask(fake, "PUT", "a", NEW, seconds=0.5 if error is TimeoutError else 60)
    assert fake.objects["a"].data == (NEW if is_done else OLD)
    assert [(number, fired) for number, fired, _ in fake.fired] == [(1, kind)]
    assert ask(fake, "GET", "a")[0] == 200


def test_an_answer_that_is_cut_announces_more_than_it_sends(fake: FakeS3) -> None:
    fake.arm(Fault(kind=Kind.CUT))
    with pytest.raises(http.client.IncompleteRead):
        ask(fake, "GET", "a")


@pytest.mark.parametrize(
    ("kind", "method", "status", "sent", "stored"),
    [
        (Kind.SHORTEN, "GET", 200, OLD[:6], OLD),
        (Kind.STATUS, "PUT", None, None, OLD),
        (Kind.REFUSE_AFTER, "PUT", 503, None, NEW),
        (Kind.ERROR_200, "GET", 200, None, OLD),
        (Kind.DRIP, "GET", 200, OLD, OLD),
        (Kind.DUPLICATE, "PUT", 200, b"", NEW),
    ],
)
def test_a_fault_of_the_answer(
    fake: FakeS3, kind: Kind, method: str, status: int | None, sent: bytes | None, stored: bytes
) -> None:
    fake.arm(Fault(kind=kind))
    began = time.monotonic()
    answer = ask(fake, method, "a", NEW if method == "PUT" else None)
    assert answer[0] == status if status else answer[0] >= 400
    assert answer[1] == sent if sent is not None else b"<Error>" in answer[1]
    assert fake.objects["a"].data == stored
    assert kind is not Kind.DRIP or time.monotonic() - began > 0.2


@pytest.mark.parametrize(("kind", "method"), [(Kind.FLIP, "GET"), (Kind.FLIP_REQUEST, "PUT")])
def test_damage_is_one_bit(fake: FakeS3, kind: Kind, method: str) -> None:
    fake.arm(Fault(kind=kind))
    body = ask(fake, method, "a", OLD if method == "PUT" else None)[1]
    found = body if method == "GET" else fake.objects["a"].data
    assert sum((a ^ b).bit_count() for a, b in zip(found, OLD, strict=True)) == 1


def test_a_status_is_drawn_and_a_conflict_only_of_conditional_writes(fake: FakeS3) -> None:
    fake.arm(Fault(kind=Kind.STATUS))
    given = {ask(fake, "PUT", "a", NEW)[0] for _ in range(40)}
    assert {503, 500, 429, 400} <= given
    assert 409 not in given


def test_a_replayed_write_overwrites_a_later_one(fake: FakeS3) -> None:
    fake.arm(Fault(kind=Kind.REPLAY, times=1))
    ask(fake, "PUT", "a", OLD)
    ask(fake, "PUT", "a", NEW)
    for _ in range(6):
        ask(fake, "GET", "b")
    assert (fake.objects["a"].data, fake.settle()) == (OLD, 0)
    fake.arm(Fault(kind=Kind.REPLAY, times=1))
    ask(fake, "PUT", "a", NEW)
    assert fake.settle() == 1


def test_a_stale_read_shows_what_was_there_before(fake: FakeS3) -> None:
    ask(fake, "PUT", "a", NEW)
    ask(fake, "PUT", "b", NEW)
    ask(fake, "DELETE", "b")
    ask(fake, "PUT", "c", NEW)
    fake.arm(Fault(kind=Kind.STALE))
    assert [ask(fake, "GET", key) for key in "ab"] == [(200, OLD), (200, NEW)]
    assert ask(fake, "HEAD", "c")[0] == 404
    listing = ask(fake, "GET", "?list-type=2")[1]
    assert (b"<Key>a<" in listing, b"<Key>c<" in listing) == (True, False)
    assert len(fake.fired) == 4


@pytest.mark.parametrize(
    ("kind", "method", "key"),
    [
        (Kind.FLIP, "HEAD", "a"),
        (Kind.SHORTEN, "DELETE", "a"),
        (Kind.CUT, "HEAD", "a"),
        (Kind.FLIP_REQUEST, "GET", "a"),
        (Kind.REPLAY, "GET", "a"),
        (Kind.STALE, "PUT", "a"),
        (Kind.STALE, "GET", "never/written"),
    ],
)
def test_a_fault_that_cannot_happen_does_not_count(
    fake: FakeS3, kind: Kind, method: str, key: str
) -> None:
    fake.arm(Fault(kind=kind))
    assert ask(fake, method, key, OLD if method == "PUT" else None)[0] in (200, 204, 404)
    assert fake.fired == []


@pytest.mark.parametrize("kind", NETWORK_FAULTS, ids=lambda kind: kind.name)
def test_each_kind_happens_to_the_request_that_it_is_meant_for(fake: FakeS3, kind: Kind) -> None:
    method = "PUT" if kind in (Kind.FLIP_REQUEST, Kind.REPLAY) else "GET"
    fake.arm(Fault(kind=kind, skip=1, times=1, verb=method, key="^a"))
    number = 7 if method == "PUT" else 8
    for key in "bacaa":
        for verb, body in (("PUT", b"%d" % len(fake.requests)), ("GET", None)):
            with contextlib.suppress(OSError, http.client.HTTPException):
                ask(fake, verb, key, body, seconds=1 if len(fake.requests) == number - 1 else 60)
    found = [(at, fired, request.key) for at, fired, request in fake.fired]
    assert (len(fake.requests), found) == (10, [(number, kind, "a")])


def test_a_storm_of_one_seed_is_always_the_same_and_spares_the_calm_address(fake: FakeS3) -> None:
    def fired(seed: int) -> list[tuple[int, Kind]]:
        fake.arm(storm=Storm(rate=0.5, kinds=(Kind.STATUS, Kind.LOSE, Kind.FLIP)), seed=seed)
        for _ in range(20):
            with contextlib.suppress(http.client.HTTPException):
                ask(fake, "GET", "a")
        return [(number, kind) for number, kind, _ in fake.fired]

    first = fired(1)
    assert 3 < len(first) < 17
    assert fired(2) != first == fired(1)
    fake.arm(storm=Storm(rate=1.0))
    connection = http.client.HTTPConnection(fake.calm_endpoint.removeprefix("http://"))
    connection.request("GET", "/fake/a")
    assert connection.getresponse().read() == OLD
    connection.close()
    assert fake.requests == fake.fired == []
