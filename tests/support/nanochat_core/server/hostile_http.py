"""Requests that the server must refuse or cut: of a foreign name, too large, without an end."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import httpx

HEAD = b"POST /chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
FOREIGN_HOSTS = ("evil.example", "localhost.evil.example", "")
UNFINISHED = (b"", b"GET /hea", HEAD, HEAD + b"Content-Length: 100\r\n\r\n" + b"{")
LARGEST = 2**20  # bytes of a body


def _in_chunks() -> Iterator[bytes]:
    for _ in range(40):
        yield b" " * 100_000


TOO_LARGE: dict[str, Callable[[], bytes | Iterator[bytes]]] = {
    "by its length": lambda: b" " * (LARGEST + 1),
    "in chunks": _in_chunks,
}


def post_too_large(url: str, how: str) -> httpx.Response | None:
    """Post a body that is too large; None means that the connection was cut meanwhile."""
    kind = {"Content-Type": "application/json"}
    try:
        content = TOO_LARGE[how]()
        return httpx.post(f"{url}/chat/completions", content=content, headers=kind, timeout=30)
    except (httpx.WriteError, httpx.ReadError):
        return None


def connect(port: int) -> socket.socket:
    """Open a connection that waits at most a minute."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(60)
    return connection


def is_cut(connection: socket.socket) -> bool:
    """Return whether the server ends the connection before its timeout."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def is_drip_cut(port: int) -> bool:
    """Send a request a byte at a time, for 20 s; return whether it is cut before its end."""
    with connect(port) as connection, contextlib.suppress(ConnectionError):
        for byte in HEAD * 10:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)
        return False
    return True
