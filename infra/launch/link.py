"""A connection between node 0 of a job and another node: JSON objects, one a line, both ways.

A node that connects first sends the secret that all nodes read from the store; before that node 0
sends it nothing. From then on the connection is the membership. It ends with the process at either
end, and an end that hears nothing for `silence` seconds takes the other for lost (a pulled cable, a
host that hangs): so each sends an empty object now and then. Never a pickle, which another host
could have code run by.
"""

import contextlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any, cast

from infra.polling import ANSWER_SECONDS, POLL_SECONDS

_LONGEST = 2**16  # bytes of a line
# Connections that have not sent the secret: at most so many, each at most so long. Nodes send it at
# once, so only a flood of connections within one round trip could keep a node out.
MAX_UNKNOWN = 64


class LinkLost(Exception):
    """The other end is gone, or silent. The text says which: "is gone"."""


class Link:
    """One end of a connection. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket, *, silence: float) -> None:
        connection.settimeout(silence)
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._silence = silence
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; an empty one is a sign of life. That the link is lost shows `receive`."""
        data = json.dumps(message).encode() + b"\n"
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(data)

    def receive(self) -> dict[str, Any]:
        """Return the next message that is not empty. Raises LinkLost."""
        while True:
            try:
                line = self._lines.readline(_LONGEST)
                tree: Any = json.loads(line) if line.endswith(b"\n") else None
            except TimeoutError:
                raise LinkLost(f"is silent for {self._silence:.0f} s") from None
            except (OSError, ValueError, RecursionError):  # reset, closed here, no message of ours
                raise LinkLost("is gone") from None
            if not isinstance(tree, dict):
                raise LinkLost("is gone")
            if tree:
                return cast("dict[str, Any]", tree)

    def close(self) -> None:
        """End the connection; a `receive` that waits raises LinkLost."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes up a `receive`, which has a lock
        self._lines.close()
        self._connection.close()


def open_link(endpoint: str, *, secret: str, silence: float) -> Link | None:
    """Connect to `endpoint`, host:port. None means that no process listens or answers there."""
    host, _, port = endpoint.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), min(silence, ANSWER_SECONDS))
        connection.sendall(_first_line(secret))
    except (OSError, ValueError):
        return None
    return Link(connection, silence=silence)


def accept_links(
    listener: socket.socket, *, secret: str, silence: float, over: threading.Event
) -> Iterator[Link]:
    """Yield a link for each connection that begins with the secret, until `over` is set.

    Another is closed: when it has sent as many bytes as the secret has or has ended, after
    ANSWER_SECONDS, or as the oldest of more than MAX_UNKNOWN. Nothing is sent to it.
    """
    expected = _first_line(secret)
    listener.setblocking(False)
    unknown: dict[socket.socket, tuple[float, bytes]] = {}  # deadline and bytes so far, by age
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [connection.close() for connection in unknown])
        while not over.is_set():
            ready = cast("list[socket.socket]", wait([listener, *unknown], POLL_SECONDS))
            for connection in ready:
                if connection is listener:
                    with contextlib.suppress(OSError):  # it has ended already
                        unknown[listener.accept()[0]] = (time.monotonic() + ANSWER_SECONDS, b"")
                    continue
                deadline, received = unknown[connection]
                # No byte more: what follows the secret is the first message.
                data = _receive(connection, len(expected) - len(received))
                unknown[connection] = (deadline, received + data)
                if data and len(received + data) < len(expected):
                    continue
                del unknown[connection]
                # In one comparison of constant time: no prefix can be guessed by itself.
                if hmac.compare_digest(received + data, expected):
                    yield Link(connection, silence=silence)
                else:
                    connection.close()
            for connection, (deadline, _) in list(unknown.items()):
                if time.monotonic() > deadline or len(unknown) > MAX_UNKNOWN:
                    del unknown[connection]
                    connection.close()


def _receive(connection: socket.socket, most: int) -> bytes:
    """Return the bytes that have arrived; empty if the connection has ended."""
    try:
        return connection.recv(most, socket.MSG_DONTWAIT)
    except OSError:
        return b""


def _first_line(secret: str) -> bytes:
    return secret.encode() + b"\n"
