"""Servers of files in a thread; an ordinary one with one file, which misbehaves on request."""

import hashlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any

from tests.support.serving import QuietHandler

CHUNK = 1 << 14


class FileServer(ThreadingHTTPServer):
    """A server that runs until `stop`; its handlers find in `owner` what they answer."""

    daemon_threads = True
    # A client connects from eight threads at once. Linux drops a connection beyond the queue,
    # five by default, and a client tries again after 1, 3 and 7 s of the ten that it waits.
    request_queue_size = 64

    def __init__(self, handler: type["FileHandler"], owner: Any) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.owner = owner
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: clients go away."""


class FileHandler(QuietHandler):
    """A handler of a file server."""

    protocol_version = "HTTP/1.1"
    server: FileServer

    def send(
        self, status: int, body: bytes, headers: Mapping[str, str], *, pause: float = 0.0
    ) -> None:
        """Send a whole answer; wait so many seconds before each chunk of its body."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        for first in range(0, len(body), CHUNK):
            time.sleep(pause)
            self.wfile.write(body[first : first + CHUNK])


def spoiled(data: bytes) -> bytes:
    """Return the data with another byte in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@dataclass(kw_only=True)
class Answer:
    """How one request is answered, where not as it should be."""

    status: int | None = None  # this one, and nothing else
    headers: Mapping[str, str] = field(default_factory=dict)
    after: int | None = None  # bytes of the body, then the connection is closed
    spoils: bool = False  # one byte is another


class WebServer:
    """The server, a context manager. `answers` are used up one by one; then all is well."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.answers: list[Answer] = []
        self.gets = self.heads = 0  # requests for bytes, and for none
        self.has_validator = True
        self._server = FileServer(_Handler, self)
        self.url = f"{self._server.url}/bundle.zip"

    @property
    def validator(self) -> str:
        return f'"{hashlib.sha256(self.data).hexdigest()[:16]}"'

    def __enter__(self) -> "WebServer":
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop()


class _Handler(FileHandler):
    def do_GET(self) -> None:
        web: WebServer = self.server.owner
        is_get = self.command == "GET"
        web.gets, web.heads = web.gets + is_get, web.heads + (not is_get)
        answer = Answer()
        if web.answers and (is_get or web.answers[0].status == 302):  # of every request
            answer = web.answers.pop(0)
        if answer.status is not None:
            return self.send(answer.status, b"", answer.headers)
        headers = {"ETag": web.validator} if web.has_validator else {}
        data = spoiled(web.data) if answer.spoils else web.data
        if answer.after is not None:
            headers["Content-Length"] = str(len(data))
            self.close_connection = True
        self.send(200, data[: answer.after], headers)

    do_HEAD = do_GET
