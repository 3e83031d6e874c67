"""HTTP for a fake S3 server: reads requests, lets faults happen to them, sends answers."""

import threading
import time
from collections.abc import Callable
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.support.infra.storage.misbehaviour import (
    PAGE,
    Answer,
    FakeError,
    Fault,
    Kind,
    Quirk,
    Request,
)


class Fake(Protocol):
    """What answers the requests."""

    quirks: set[Quirk]
    faults: list[Fault]
    requests: list[Request]
    now: Callable[[], float]

    def answer(self, request: Request) -> Answer:
        """Carry a request out. Raises FakeError."""
        ...


def serve(fake: Fake) -> ThreadingHTTPServer:
    """Serve on a free port, in threads, until it is shut down."""

    class OfThisFake(Handler):
        pass

    OfThisFake.fake = fake
    server = Server(("127.0.0.1", 0), OfThisFake)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


class Server(ThreadingHTTPServer):
    """A thread for each connection; many may come at once."""

    daemon_threads = True
    request_queue_size = 64


class Handler(BaseHTTPRequestHandler):
    """A connection."""

    fake: Fake
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def do_any(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        request = Request(
            method=self.command,
            bucket=bucket,
            key=key,
            query=dict(parse_qsl(parts.query, keep_blank_values=True)),
            headers={name.lower(): value for name, value in self.headers.items()},
            body=self.rfile.read(int(self.headers.get("Content-Length") or 0)),
        )
        self.fake.requests.append(request)
        fault = next((fault for fault in self.fake.faults if fault.fires(request)), None)
        answer = carry_out(self.fake, request, fault)
        if answer is None:
            self.close_connection = True
            return
        self.reply(answer, fault)

    def reply(self, answer: Answer, fault: Fault | None) -> None:
        body = answer.body
        if fault and body and fault.kind is Kind.FLIP and answer.status < 300:
            body = bytes([body[0] ^ 1]) + body[1:]
        if fault and body and fault.kind is Kind.SHORTEN:
            body = body[:-1]
        self.send_response_only(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if Quirk.SENDS_NO_DATE not in self.fake.quirks and "Date" not in answer.headers:
            self.send_header("Date", formatdate(self.fake.now(), usegmt=True))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault and fault.kind is Kind.CUT:
            body, self.close_connection = body[: len(body) // 2], True
        self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_any

    def log_message(self, format: str, *args: object) -> None:
        return


def carry_out(fake: Fake, request: Request, fault: Fault | None) -> Answer | None:
    """The answer to a request, None when there is none to send."""
    kind = fault.kind if fault else None
    try:
        if fault and kind in (Kind.REFUSE, Kind.HANG):
            time.sleep(fault.seconds)
            raise FakeError(fault.status, fault.code, fault.headers)
        if kind is Kind.RESET:
            return None
        if fault and kind is Kind.PAGE:
            headers = {"Content-Type": "text/html", **fault.headers}
            return Answer(status=fault.status, body=PAGE, headers=headers)
        if kind is Kind.ERROR_200:
            return FakeError(200, "InternalError").answer
        if kind is Kind.FLIP_REQUEST and request.body:
            request.body = bytes([request.body[0] ^ 1]) + request.body[1:]
        answer = fake.answer(request)
        if fault and kind is Kind.REFUSE_AFTER:
            raise FakeError(fault.status, fault.code)
        return None if kind is Kind.LOSE else answer
    except FakeError as error:
        answer = error.answer
        if request.method == "HEAD":
            answer.body = b""
        return answer
