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
from typing import Any, cast

from infra.polling import ANSWER_SECONDS

_LONGEST = 2**16  # bytes of a line


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

    def begins_with(self, secret: str) -> bool:
        """Return whether the connection begins with the secret, for which this waits a while."""
        expected = f"{secret}\n".encode()
        self._connection.settimeout(ANSWER_SECONDS)
        try:
            # No byte more: what follows the secret is the first message.
            received = self._lines.read(len(expected))
            self._connection.settimeout(self._silence)
        except OSError:  # silent, or gone
            return False
        # In one comparison of constant time: no prefix can be guessed by itself.
        return hmac.compare_digest(received, expected)

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
        connection.sendall(f"{secret}\n".encode())
    except (OSError, ValueError):
        return None
    return Link(connection, silence=silence)
