"""HTTP for a fake S3 server: reads requests, lets faults happen to them, sends answers."""

import os
import random
import socket
import struct
import threading
import time
from dataclasses import replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.support.infra.storage.misbehaviour import (
    CONFLICT,
    PAGE,
    STATUSES,
    Answer,
    FakeError,
    Fault,
    Kind,
    Quirk,
    Request,
)

if TYPE_CHECKING:  # which imports this module
    from tests.support.infra.storage.fake_s3 import FakeS3

LONGEST_WAIT = 6  # requests until a replayed one arrives
_PIECES = 20  # of an answer that drips
_READS, _WRITES = ("GET", "HEAD"), ("PUT", "POST", "DELETE")
_OF_S3 = {"x-amz-request-id": "fault"}


def serve(fake: "FakeS3", *, is_calm: bool = False) -> ThreadingHTTPServer:
    """Serve on a free port, in threads, until it is shut down; a calm one without faults."""
    handler = type("Handler", (_Handler,), {"fake": fake, "is_calm": is_calm})
    server = _Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


class _Server(ThreadingHTTPServer):
    """A thread for each connection; many may come at once."""

    daemon_threads = True
    request_queue_size = 64


class _Handler(BaseHTTPRequestHandler):
    """A connection."""

    fake: "FakeS3"
    is_calm: bool
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle(self) -> None:
        self.fake.connections.add(self.connection)
        try:
            super().handle()
        finally:
            self.fake.connections.discard(self.connection)

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, ValueError):  # ValueError: this side has reset it
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
            body=b"",
        )
        number, fault = (0, None) if self.is_calm else self.fake.meet(request)
        kind = fault.kind if fault else None
        length = int(self.headers.get("Content-Length") or 0)
        if kind is not Kind.RESET:
            request.body = self.rfile.read(length // 2 if kind is Kind.RESET_REQUEST else length)
        if fault and kind in (Kind.RESET, Kind.RESET_REQUEST):
            self.fake.fired.append((number, fault.kind, request))
            self._reset()
            return
        chance = random.Random(f"{self.fake.seed} {number}")
        answer, happened = _carry_out(self.fake, request, fault, number, chance)
        body = b"" if self.command == "HEAD" else answer.body
        if kind in (Kind.FLIP, Kind.SHORTEN, Kind.CUT) and not body:
            happened, kind = False, None
        if fault and happened:
            self.fake.fired.append((number, fault.kind, request))
        if kind in (Kind.HANG, Kind.BLACKHOLE):
            self.rfile.read(1)  # until the client gives up
        if kind in (Kind.HANG, Kind.BLACKHOLE, Kind.LOSE):
            self.close_connection = True
            return
        if kind is Kind.FLIP:
            answer.body = body = _flip(body, chance)
        elif kind is Kind.SHORTEN:
            answer.body = body = body[: len(body) // 2]
        self._send(answer, body, kind)

    def _send(self, answer: Answer, body: bytes, kind: Kind | None) -> None:
        headers = {"Content-Length": str(len(answer.body)), **answer.headers}
        if Quirk.SENDS_NO_DATE not in self.fake.quirks:
            headers["Date"] = formatdate(self.fake.now(), usegmt=True)
        lines = [f"HTTP/1.1 {answer.status} X", *(f"{k}: {v}" for k, v in headers.items())]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        data = head + body
        if kind is Kind.CUT:
            self.close_connection, data = True, head + body[: len(body) // 2]
        if kind is Kind.RESET_ANSWER:
            self.wfile.write(data[: len(data) // 2])
            time.sleep(0.01)  # until it has left: a reset overtakes what has not
            self._reset()
            return
        size = -(-len(data) // _PIECES) if kind is Kind.DRIP else len(data)
        for start in range(0, len(data), size):
            if start:
                time.sleep(self.fake.slow / _PIECES)
            self.wfile.write(data[start : start + size])

    def _reset(self) -> None:
        """End the connection by RST instead of FIN."""
        self.close_connection = True
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        os.close(self.connection.detach())

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_any

    def log_message(self, format: str, *args: object) -> None:
        return


def _carry_out(
    fake: "FakeS3", request: Request, fault: Fault | None, number: int, chance: random.Random
) -> tuple[Answer, bool]:
    """Return the answer to a request, and whether the fault could happen to it."""
    happened = True
    if fault and (refusal := _refusal(request, fault, chance)):
        return refusal, True
    match fault.kind if fault else None:
        case Kind.FLIP_REQUEST:
            happened, request.body = bool(request.body), _flip(request.body, chance)
        case Kind.DUPLICATE:
            _outcome(fake, request)
        case Kind.REPLAY:
            if happened := request.method in _WRITES:
                fake.later.append((number + chance.randint(1, LONGEST_WAIT), request))
        case Kind.STALE:
            before = _outcome(fake, replace(request, is_stale=request.method in _READS))
            return before, before != _outcome(fake, request)
        case _:
            pass
    answer = _outcome(fake, request)
    if fault and fault.kind is Kind.REFUSE_AFTER:
        answer = FakeError(fault.status, fault.code, _OF_S3).answer_to(request)
    return answer, happened


def _refusal(request: Request, fault: Fault, chance: random.Random) -> Answer | None:
    """Return the answer of a fault that keeps the request from being carried out."""
    match fault.kind:
        case Kind.BLACKHOLE:
            return Answer()
        case Kind.PAGE:
            headers = {"Content-Type": "text/html", **fault.headers}
            return Answer(status=fault.status, body=PAGE, headers=headers)
        case Kind.REFUSE:
            return FakeError(fault.status, fault.code, fault.headers).answer_to(request)
        case Kind.STATUS:
            codes = [*STATUSES, CONFLICT] if request.is_conditional else STATUSES
            return FakeError(*chance.choice(codes), _OF_S3).answer_to(request)
        case Kind.ERROR_200:
            return FakeError(200, "InternalError", _OF_S3).answer_to(request)
        case _:
            return None


def _outcome(fake: "FakeS3", request: Request) -> Answer:
    try:
        return fake.answer(request)
    except FakeError as error:
        return error.answer_to(request)


def _flip(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with one bit changed."""
    changed: Any = bytearray(data)
    if changed:
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)
