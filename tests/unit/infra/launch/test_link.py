"""A connection between two nodes: messages arrive whole, and an end that is gone is noticed."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from infra.launch.link import Link, LinkLost, open_link


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


def test_silence_is_an_end() -> None:
    one, two = socket.socketpair()
    link = Link(one, silence=0.05)
    with pytest.raises(LinkLost, match="is silent for 0 s"):
        link.receive()
    link.close()
    two.close()


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n", b"[1]\n", b"\xff\n", b"[" * 60_000 + b"\n", b"{" * 70_000]
)
def test_what_is_no_message_ends_the_connection(said: bytes) -> None:
    one, two = socket.socketpair()
    link = Link(one, silence=30.0)
    sender: Any = threading.Thread(target=two.sendall, args=(said,), daemon=True)
    sender.start()
    with pytest.raises(LinkLost):
        link.receive()
    link.close()
    two.close()


def test_where_no_process_listens_there_is_no_connection() -> None:
    assert open_link("no such host:1", secret="x", silence=1.0) is None
    assert open_link("nonsense", secret="x", silence=1.0) is None
