"""The fault proxy does to requests what each kind of fault says, and nothing else."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.reliability.fault_kinds import KINDS
from tests.support.reliability.fault_proxy import Fault, FaultProxy, Storm

OLD, NEW = b"old contents", b"new contents, longer"


@dataclass
class Server:
    """Objects under paths, and what was asked for, as it arrived."""

    objects: dict[str, bytes] = field(default_factory=dict)
    seen: list[tuple[str, str, bytes]] = field(default_factory=list)  # method, path, body
    hosts: set[str] = field(default_factory=set)
    address: tuple[str, int] = ("", 0)


@dataclass(frozen=True)
class Answer:
    """What a client got."""

    status: int
    body: bytes


class Upstream(ThreadingHTTPServer):
    """Puts objects into `state`."""

    daemon_threads = True
    state: Server


class Handler(BaseHTTPRequestHandler):
    """Just enough of an object store."""

    protocol_version = "HTTP/1.1"

    @property
    def state(self) -> Server:
        assert isinstance(self.server, Upstream)
        return self.server.state

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if len(body) == int(self.headers["Content-Length"]):
            self._note(body)
            self.state.objects[self.path] = body
            self._say(200, b"stored")

    def do_DELETE(self) -> None:
        self._note(b"")
        self.state.objects.pop(self.path, None)
        self._say(204, b"")

    def do_GET(self) -> None:
        self._note(b"")
        objects = self.state.objects
        if self.path == "/list":
            keys = "".join(f"<Contents>{key}</Contents>" for key in sorted(objects))
            self._say(200, f"<ListBucketResult>{keys}</ListBucketResult>".encode())
        elif self.path == "/chunked":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nTrailer: t\r\n\r\n")
        else:
            self._say(*((200, objects[self.path]) if self.path in objects else (404, b"none")))

    do_HEAD = do_GET

    def _note(self, body: bytes) -> None:
        self.state.seen.append((self.command, self.path, body))
        self.state.hosts.add(self.headers["Host"])

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            super().handle()


@pytest.fixture
def server() -> Generator[Server]:
    with Upstream(("127.0.0.1", 0), Handler) as upstream:
        upstream.state = Server(address=("127.0.0.1", upstream.server_address[1]))
        thread = threading.Thread(target=upstream.serve_forever, args=(0.01,))
        thread.start()
        yield upstream.state
        upstream.shutdown()
        thread.join()


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    server.objects["/a"] = OLD
    with FaultProxy(server.address, slow=0.2) as started:
        yield started


def ask(
    proxy: FaultProxy, method: str, path: str, body: bytes | None = None, *, seconds: float = 60
) -> Answer:
    """One request over a connection of its own, with so much patience."""
    host = proxy.endpoint.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=seconds)
    try:
        connection.request(method, path, body=body)
        answer = connection.getresponse()
        return Answer(answer.status, answer.read())
    finally:
        connection.close()


def stored(server: Server) -> int:
    """How many PUTs reached the server whole."""
    return sum(method == "PUT" for method, _, _ in server.seen)


def test_without_faults_everything_goes_through_unchanged(
    proxy: FaultProxy, server: Server
) -> None:
    assert ask(proxy, "PUT", "/b?x=1", NEW) == Answer(200, b"stored")
    assert ask(proxy, "GET", "/b?x=1") == Answer(200, NEW)
    assert ask(proxy, "GET", "/c") == Answer(404, b"none")
    assert ask(proxy, "HEAD", "/a") == Answer(200, b"")
    assert ask(proxy, "DELETE", "/a") == Answer(204, b"")
    assert ask(proxy, "GET", "/chunked") == Answer(200, b"abcde")
    assert (proxy.requests, proxy.fired) == (6, [])
    assert server.hosts == {proxy.endpoint.removeprefix("http://")}  # what a signature covers


def test_a_connection_carries_many_requests_and_large_bodies(proxy: FaultProxy) -> None:
    connection = http.client.HTTPConnection(proxy.endpoint.removeprefix("http://"), timeout=60)
    large = bytes(range(256)) * 20_000
    for method, body in (("PUT", large), ("GET", None), ("HEAD", None), ("GET", None)):
        connection.request(method, "/large", body=body)
        answer = connection.getresponse()
        assert answer.read() == {"PUT": b"stored", "GET": large, "HEAD": b""}[method]
        assert answer.getheader("Content-Length") == ("6" if method == "PUT" else str(len(large)))
    connection.close()


def test_a_client_that_waits_for_leave_to_send_its_body_gets_it(
    proxy: FaultProxy, server: Server
) -> None:
    with socket.create_connection(("127.0.0.1", int(proxy.endpoint.rpartition(":")[2]))) as plug:
        plug.settimeout(60)
        plug.sendall(b"PUT /b HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\n")
        plug.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        assert plug.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        plug.sendall(b"4\r\nbody\r\n0\r\n\r\n")
        assert plug.recv(100).startswith(b"HTTP/1.1 200")
    assert server.objects["/b"] == b"body"


@pytest.mark.parametrize(
    ("kind", "error", "reached"),
    [
        ("reset_before", ConnectionResetError, 0),
        ("reset_request", ConnectionResetError, 0),
        ("drop_response", http.client.RemoteDisconnected, 1),
        ("reset_response", (ConnectionResetError, http.client.IncompleteRead), 1),
        ("truncate", http.client.IncompleteRead, 1),
        ("hang", TimeoutError, 1),
        ("blackhole", TimeoutError, 0),
    ],
)
def test_a_fault_of_the_connection_leaves_the_client_without_an_answer(
    proxy: FaultProxy, server: Server, kind: str, error: type[Exception], reached: int
) -> None:
    proxy.arm(Fault(kind=kind))
    with pytest.raises(error):
        ask(proxy, "PUT", "/a", NEW, seconds=0.5 if error is TimeoutError else 60)
    while stored(server) < reached:  # the client of one that hangs may have left before
        time.sleep(0.01)
    assert (stored(server), server.objects["/a"]) == (reached, NEW if reached else OLD)
    assert [fired.kind for fired in proxy.fired] == [kind]
    assert ask(proxy, "GET", "/a").status == 200  # the next request is well


def test_a_shortened_answer_says_that_it_is_whole(proxy: FaultProxy) -> None:
    proxy.arm(Fault(kind="shorten"))
    assert ask(proxy, "GET", "/a") == Answer(200, OLD[:6])


def test_a_corrupt_answer_differs_in_one_bit(proxy: FaultProxy) -> None:
    proxy.arm(Fault(kind="corrupt"))
    assert different_bits(ask(proxy, "GET", "/a").body, OLD) == 1


def test_a_corrupt_request_arrives_with_one_bit_changed(proxy: FaultProxy, server: Server) -> None:
    proxy.arm(Fault(kind="corrupt_request"))
    assert ask(proxy, "PUT", "/a", NEW).status == 200
    assert different_bits(server.objects["/a"], NEW) == 1


def different_bits(one: bytes, other: bytes) -> int:
    assert len(one) == len(other)
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))


def test_a_status_is_given_without_asking_the_server(proxy: FaultProxy, server: Server) -> None:
    proxy.arm(Fault(kind="status", count=40))
    given = {ask(proxy, "PUT", "/a", NEW).status for _ in range(40)}
    assert {503, 500, 429, 400} <= given
    assert server.seen == []


def test_an_error_may_come_after_the_server_did_it(proxy: FaultProxy, server: Server) -> None:
    proxy.arm(Fault(kind="status_after"))
    assert ask(proxy, "PUT", "/a", NEW).status == 500
    assert server.objects["/a"] == NEW


def test_an_error_may_call_itself_200(proxy: FaultProxy, server: Server) -> None:
    proxy.arm(Fault(kind="error200"))
    answer = ask(proxy, "GET", "/a")
    assert (answer.status, b"<Error>" in answer.body) == (200, True)


def test_an_answer_that_drips_is_whole_and_late(proxy: FaultProxy) -> None:
    proxy.arm(Fault(kind="drip"))
    began = time.monotonic()
    assert ask(proxy, "GET", "/a") == Answer(200, OLD)
    assert time.monotonic() - began > 0.15


def test_a_duplicate_reaches_the_server_twice(proxy: FaultProxy, server: Server) -> None:
    proxy.arm(Fault(kind="duplicate"))
    assert ask(proxy, "PUT", "/a", NEW) == Answer(200, b"stored")
    assert stored(server) == 2


def test_a_replayed_write_overwrites_a_later_one(proxy: FaultProxy, server: Server) -> None:
    proxy.arm(Fault(kind="replay_later", method="PUT"))
    ask(proxy, "PUT", "/a", OLD)
    ask(proxy, "PUT", "/a", NEW)
    for _ in range(6):
        ask(proxy, "GET", "/b")
    assert (server.objects["/a"], stored(server), proxy.settle()) == (OLD, 3, 0)


def test_what_was_not_replayed_yet_can_be_had_at_once(proxy: FaultProxy, server: Server) -> None:
    proxy.arm(Fault(kind="replay_later"))
    ask(proxy, "PUT", "/a", NEW)
    assert (proxy.settle(), stored(server)) == (1, 2)


def test_a_stale_read_shows_what_was_there_before(proxy: FaultProxy, server: Server) -> None:
    proxy.arm(Fault(kind="stale", method="GET|HEAD", nth=2, count=9))
    assert ask(proxy, "GET", "/a") == Answer(200, OLD)
    ask(proxy, "PUT", "/a", NEW)
    ask(proxy, "PUT", "/b", NEW)
    assert ask(proxy, "GET", "/a") == Answer(200, OLD)
    assert ask(proxy, "HEAD", "/a") == Answer(404, b"")  # never looked at before: not there yet
    assert ask(proxy, "GET", "/b").status == 404
    assert ask(proxy, "GET", "/list").body == (
        b"<ListBucketResult><Contents>/a</Contents></ListBucketResult>"
    )
    assert len(proxy.fired) == 4


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("corrupt", "HEAD"),
        ("shorten", "DELETE"),
        ("truncate", "HEAD"),
        ("corrupt_request", "GET"),
        ("replay_later", "GET"),
        ("stale", "PUT"),
    ],
)
def test_a_fault_that_cannot_apply_does_not_fire(proxy: FaultProxy, kind: str, method: str) -> None:
    proxy.arm(Fault(kind=kind))
    assert ask(proxy, method, "/a", OLD if method == "PUT" else None).status in (200, 204)
    assert proxy.fired == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_hits_the_request_that_it_is_meant_for(
    proxy: FaultProxy, server: Server, kind: str
) -> None:
    method = "PUT" if kind in ("corrupt_request", "replay_later") else "GET"
    number = 7 if method == "PUT" else 8
    proxy.arm(Fault(kind=kind, nth=2, method=method, target="^/a"))
    for path in ("/b", "/a", "/c", "/a", "/a"):
        for verb, body in (("PUT", NEW if path == "/a" else OLD), ("GET", None)):
            with contextlib.suppress(OSError, http.client.HTTPException):
                is_hit = proxy.requests == number - 1
                ask(proxy, verb, path, body, seconds=1 if is_hit else 60)
    assert proxy.requests == 10
    assert [(f.kind, f.target, f.method, f.request) for f in proxy.fired] == [
        (kind, "/a", method, number)
    ]


def test_a_storm_of_one_seed_is_always_the_same(proxy: FaultProxy, tmp_path: Path) -> None:
    def fired(seed: int) -> str:
        proxy.arm(storm=Storm(rate=0.5, kinds=("status", "drop_response", "corrupt")), seed=seed)
        for _ in range(20):
            with contextlib.suppress(http.client.HTTPException):
                ask(proxy, "GET", "/a")
        proxy.write_log(tmp_path / "fired.jsonl")
        return (tmp_path / "fired.jsonl").read_text()

    first = fired(1)
    assert 3 < len(first.splitlines()) < 17
    assert set(json.loads(first.splitlines()[0])) == {
        "request",
        "kind",
        "method",
        "target",
        "status",
    }
    assert (fired(1), fired(2)) != (first, first)
    assert fired(1) == first
