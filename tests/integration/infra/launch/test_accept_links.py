"""Node 0's port: a node with the secret is let in, anything else is closed and gets no byte."""

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from infra.launch import link
from infra.launch.link import Link, open_link

SECRET = "0123456789abcdef0123456789abcdef"


class Port:
    """A port that lets connections with SECRET in."""

    def __init__(self, listener: socket.socket) -> None:
        self.endpoint = "{}:{}".format(*listener.getsockname())
        self.admitted: queue.Queue[Link] = queue.Queue()
        self._address = listener.getsockname()

    def connect(self, first: bytes = b"") -> socket.socket:
        client = socket.create_connection(self._address, timeout=30.0)
        client.sendall(first)
        return client


@pytest.fixture
def port() -> Iterator[Port]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = Port(listener)

        def hear(link: Link) -> None:
            if link.begins_with(SECRET):
                port.admitted.put(link)
            else:
                link.close()

        def accept() -> None:
            with contextlib.suppress(OSError):  # the end of the test
                while True:
                    link = Link(listener.accept()[0], silence=30.0)
                    threading.Thread(target=hear, args=(link,), daemon=True).start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        yield port
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()


def said_to(client: socket.socket) -> bytes:
    """Return all bytes that the port sends until it closes the connection."""
    said = b""
    with client, contextlib.suppress(ConnectionError):  # a reset closes it too
        while data := client.recv(100):
            said += data
    return said


def test_a_secret_may_arrive_in_pieces(port: Port) -> None:
    with port.connect(SECRET[:7].encode()) as client:
        with port.connect() as other:  # accepted after it, so that the piece has been read
            other.sendall(b"x" * 40)
            assert said_to(other) == b""
        client.sendall(SECRET[7:].encode() + b'\n{"a": 1}\n')
        ours = port.admitted.get(timeout=30.0)
        assert ours.receive() == {"a": 1}
        ours.close()


@pytest.mark.parametrize(
    "first",
    [
        f"{SECRET[:-1]}0\n".encode(),
        f"{SECRET}0\n".encode(),
        b"GET / HTTP/1.1\r\nHost: nodes.example\r\n\r\n",
        b"\xff" * 100_000,
        b"\n" * 33,
    ],
)
def test_another_beginning_is_closed_and_gets_no_byte(port: Port, first: bytes) -> None:
    client = port.connect()
    with contextlib.suppress(ConnectionError):  # closed before all of it is sent
        client.sendall(first)
    assert said_to(client) == b""
    assert port.admitted.empty()


def test_one_that_ends_in_the_secret_is_closed(port: Port) -> None:
    client = port.connect(SECRET.encode())
    client.shutdown(socket.SHUT_WR)
    assert said_to(client) == b""


def test_one_that_is_silent_is_closed_when_its_time_is_over_and_keeps_no_node_out(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "ANSWER_SECONDS", 0.5)
    silent, slow = port.connect(), port.connect(b"01")
    node = open_link(port.endpoint, secret=SECRET, silence=30.0)
    assert node is not None
    ours = port.admitted.get(timeout=30.0)
    assert (said_to(silent), said_to(slow)) == (b"", b"")
    ours.send({"still": "here"})
    assert node.receive() == {"still": "here"}
    ours.close()
    node.close()
