"""A connection between two nodes: the secret, whole messages, and the end of the other side."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from infra.launch import link as link_module
from infra.launch.link import Link, LinkLost, open_link

SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    one, two = (Link(end, silence=30.0) for end in socket.socketpair())
    yield one, two
    one.close()
    two.close()


def test_messages_arrive_in_order_and_signs_of_life_are_none(links: tuple[Link, Link]) -> None:
    one, two = links
    for message in ({}, {"a": 1}, {}, {"b": "x\ny"}):
        one.send(message)
    assert [two.receive(), two.receive()] == [{"a": 1}, {"b": "x\ny"}]
    two.send({"c": None})
    assert one.receive() == {"c": None}


def test_an_end_that_is_closed_is_noticed_at_both(links: tuple[Link, Link]) -> None:
    one, two = links
    one.send({"last": 1})
    found: list[str] = []

    def wait() -> None:
        try:
            one.receive()
        except LinkLost as error:
            found.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    one.close()
    waiting.join()
    assert two.receive() == {"last": 1}
    with pytest.raises(LinkLost, match="is gone"):
        two.receive()
    assert found == ["is gone"]
    two.send({"late": 1})  # no error: what matters is that nothing is received


@contextlib.contextmanager
def hearing(*pieces: bytes, silence: float = 30.0, ends: bool = False) -> Iterator[Link]:
    """Yield our end of a connection whose other end sends these pieces."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        with contextlib.suppress(OSError):  # closed before all was sent
            for piece in pieces:
                theirs.sendall(piece)
            if ends:
                theirs.shutdown(socket.SHUT_WR)

    threading.Thread(target=send, daemon=True).start()
    with contextlib.closing(Link(ours, silence=silence)) as link, theirs:
        yield link


def test_silence_is_an_end() -> None:
    with hearing(f"{SECRET}\n".encode(), silence=0.05) as link:
        assert link.begins_with(SECRET)
        began = time.monotonic()
        with pytest.raises(LinkLost, match="is silent for 0 s"):
            link.receive()
        assert time.monotonic() - began < link_module.ANSWER_SECONDS


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n", b"[1]\n", b"\xff\n", b"[" * 60_000 + b"\n", b"{" * 70_000]
)
def test_what_is_no_message_ends_the_connection(said: bytes) -> None:
    with hearing(said) as link, pytest.raises(LinkLost):
        link.receive()


def test_a_secret_may_arrive_in_pieces_with_the_first_message() -> None:
    whole = f"{SECRET}\n".encode()
    with hearing(whole[:7], whole[7:] + b'{"a": 1}\n') as link:
        assert link.begins_with(SECRET)
        assert link.receive() == {"a": 1}


@pytest.mark.parametrize(
    "said",
    [
        b"",  # silent
        SECRET.encode(),  # without its end
        f"{SECRET[:-1]}0\n".encode(),
        f"{SECRET}0\n".encode(),
        b"GET / HTTP/1.1\r\nHost: nodes.example\r\n\r\n",
        b"\xff" * 100_000,
        b"\n" * 33,
    ],
)
@pytest.mark.parametrize("ends", [False, True])
def test_another_beginning_is_refused(
    said: bytes, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "ANSWER_SECONDS", 0.1)
    with hearing(said, ends=ends) as link:
        assert not link.begins_with(SECRET)


def test_where_no_process_listens_there_is_no_connection() -> None:
    assert open_link("no such host:1", secret="x", silence=1.0) is None
    assert open_link("nonsense", secret="x", silence=1.0) is None
