import contextlib
import socket
import time

import pytest

from nanochat_core.server.connection_timeouts import TimedProtocol
from tests.support.nanochat_core.server.live import HEAD, body, raw, received, wait_until

UNFINISHED = (b"", b"GET /hea", HEAD, HEAD + b"Content-Length: 100\r\n\r\n{")


@pytest.fixture
def hurried(live, monkeypatch):
    """Requests must come within 0.2 s: those of a test, that is, which are never complete."""
    monkeypatch.setattr(TimedProtocol, "receive_seconds", 0.2)
    return live


@pytest.fixture
def impatient(live, monkeypatch):
    """A client must read within 0.2 s what waits for it."""
    monkeypatch.setattr(TimedProtocol, "read_seconds", 0.2)
    return live


@pytest.mark.parametrize("sent", [*UNFINISHED, raw(body("echo hi")) + UNFINISHED[-1]])
def test_a_request_that_does_not_come_to_its_end_is_cut(hurried, sent):
    with hurried.connect() as connection:
        connection.sendall(sent)
        received(connection)


def test_so_is_one_that_comes_a_byte_at_a_time(hurried):
    def drip(connection):
        for byte in HEAD * 10:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)

    with hurried.connect() as connection, pytest.raises(ConnectionError):
        drip(connection)


def test_a_connection_in_use_is_not_cut(live, monkeypatch):
    connections = live.server.server_state.connections
    wait_until(lambda: not connections)
    with live.connect() as connection:
        wait_until(lambda: len(connections) == 1)  # its timer runs: the first request may be late
        monkeypatch.setattr(TimedProtocol, "receive_seconds", 0.05)
        monkeypatch.setattr(TimedProtocol, "read_seconds", 0.05)
        for _ in range(2):
            connection.sendall(raw(body("long", max_tokens=100)))  # takes longer than the deadlines
            answer = b""
            while not answer.endswith(b'{"done": true}\n\n\r\n0\r\n\r\n'):
                part = connection.recv(65536)
                assert part
                answer += part


def test_a_client_that_reads_nothing_is_cut_and_frees_the_slot(impatient):
    # Many answers in one stream: more than the buffers between two sockets hold.
    ask = body("long", max_tokens=4000, n=8, stream=True, logprobs=True)
    cancelled = {"name": "nanochat_answers_total", "reason": "cancelled"}
    before = impatient.count(**cancelled)
    with impatient.connect(buffer=4096) as connection:
        connection.sendall(raw(ask, b"/v1/chat/completions"))
        wait_until(lambda: impatient.count(**cancelled) == before + 8)
        wait_until(lambda: impatient.running == 0)


@pytest.mark.parametrize("kind", [b"close", b"keep-alive"])
def test_a_client_that_reads_nothing_of_a_short_answer_is_cut_too(impatient, kind, monkeypatch):
    # Less than pauses a writer, more than the kernel takes with buffers as small as these.
    accept, complete = TimedProtocol.connection_made, TimedProtocol.on_response_complete
    left = []

    def shrink(self, transport):
        own = transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        accept(self, transport)

    def note(self):
        complete(self)
        left.append(self.transport.get_write_buffer_size())

    monkeypatch.setattr(TimedProtocol, "connection_made", shrink)
    monkeypatch.setattr(TimedProtocol, "on_response_complete", note)
    connections = impatient.server.server_state.connections
    wait_until(lambda: len(connections) == 0)
    with impatient.connect(buffer=2048) as connection:
        connection.sendall(
            b"GET /openapi.json HTTP/1.1\r\nHost: x\r\nConnection: %b\r\n\r\n" % kind
        )
        wait_until(lambda: left != [])
        assert 0 < left[0] < 2**16
        wait_until(lambda: len(connections) == 0)


@pytest.mark.parametrize("method", [b"POST", b"HEAD"])
def test_what_is_not_http_is_refused_once_and_without_a_word_in_the_log(live, caplog, method):
    head = HEAD.replace(b"POST", method)
    with live.connect() as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n")
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 400 ") or method == b"HEAD"
    assert answer.count(b"HTTP/1.1") <= 1
    assert not caplog.records


def test_headers_without_an_end_are_refused(live):
    with live.connect() as connection:
        with contextlib.suppress(ConnectionError):  # it was cut while it was sent
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 20_000)
        answer = received(connection)
    assert not answer or answer.startswith(b"HTTP/1.1 4")
