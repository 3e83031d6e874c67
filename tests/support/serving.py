"""HTTP servers of tests, in a thread each."""

import contextlib
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class QuietHandler(BaseHTTPRequestHandler):
    """A handler that prints nothing and answers in one call."""

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Send a whole answer; `content_type="text/plain"` is a header."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Generator[int]:
    """Serve on a free port of 127.0.0.1 while the block runs; yield the port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
