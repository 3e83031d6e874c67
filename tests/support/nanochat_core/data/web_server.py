"""An ordinary web server with one file, which misbehaves on request."""

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


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
        self.gets = 0  # requests for bytes
        self.has_validator = True
        self.heads = 0  # requests that ask for no bytes
        self._server = _Listener(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self.url = f"http://127.0.0.1:{self._server.server_port}/bundle.zip"

    @property
    def validator(self) -> str:
        return f'"{hashlib.sha256(self.data).hexdigest()[:16]}"'

    def __enter__(self) -> "WebServer":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Listener(ThreadingHTTPServer):
    def __init__(self, web: WebServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.web = web


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Listener"

    def do_GET(self) -> None:
        web = self.server.web
        web.gets += 1
        answer = web.answers.pop(0) if web.answers else Answer()
        if answer.status is not None:
            return self._send(answer.status, b"", dict(answer.headers), answer)
        data = web.data
        if answer.spoils:
            data = data[:5] + bytes([data[5] ^ 1]) + data[6:]
        headers = {"ETag": web.validator} if web.has_validator else {}
        self._send(200, data, headers, answer)

    def do_HEAD(self) -> None:
        web = self.server.web
        web.heads += 1
        if web.answers and web.answers[0].status == 302:  # a redirect is one of every request
            answer = web.answers.pop(0)
            return self._send(302, b"", dict(answer.headers), answer)
        self.send_response(200)
        if web.has_validator:
            self.send_header("ETag", web.validator)
        self.send_header("Content-Length", str(len(web.data)))
        self.end_headers()

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], answer: Answer) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: answer.after])
        if answer.after is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """The tests read `gets`."""
