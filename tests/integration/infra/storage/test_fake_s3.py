"""The fake S3 server does to requests what each kind of fault says, and nothing else."""

import contextlib
import http.client
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.infra.storage.fake_s3 import FakeS3
from tests.support.infra.storage.misbehaviour import STATUSES, Fault, Kind, Storm

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
    fake.arm(Fault(kind=kind, skip=1, times=1, verb="PUT", key="^a"))
    ask(fake, "PUT", "ba", NEW)
    ask(fake, "PUT", "a", OLD)
    with pytest.raises(error):
        ask(fake, "PUT", "a", NEW, seconds=0.5 if error is TimeoutError else 60)
    assert fake.objects["a"].data == (NEW if is_done else OLD)
    assert [(number, fired) for number, fired, _ in fake.fired] == [(3, kind)]
    assert ask(fake, "PUT", "a", NEW)[0] == 200


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
    answer = ask(fake, method, "a", NEW if method == "PUT" else None)
    assert answer[0] == status if status else answer[0] in {code for code, _ in STATUSES}
    assert answer[1] == sent if sent is not None else b"<Error>" in answer[1]
    assert fake.objects["a"].data == stored


def test_damage_is_one_bit_and_an_answer_that_is_cut_announces_more(fake: FakeS3) -> None:
    fake.arm(Fault(kind=Kind.FLIP, verb="GET"), Fault(kind=Kind.FLIP_REQUEST, verb="PUT"))
    sent = ask(fake, "GET", "a")[1]
    ask(fake, "PUT", "a", OLD)
    for found in (sent, fake.objects["a"].data):
        assert sum((a ^ b).bit_count() for a, b in zip(found, OLD, strict=True)) == 1
    fake.arm(Fault(kind=Kind.CUT))
    with pytest.raises(http.client.IncompleteRead):
        ask(fake, "GET", "a")


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


def test_a_fault_that_cannot_happen_does_not_count(fake: FakeS3) -> None:
    for kind, method, key in (
        (Kind.FLIP, "HEAD", "a"),
        (Kind.CUT, "HEAD", "a"),
        (Kind.FLIP_REQUEST, "GET", "a"),
        (Kind.REPLAY, "GET", "a"),
        (Kind.STALE, "PUT", "a"),
        (Kind.STALE, "GET", "never/written"),
    ):
        fake.arm(Fault(kind=kind))
        ask(fake, method, key, OLD if method == "PUT" else None)
        assert fake.fired == []


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
