"""Hostile requests for the chat server, made from a seed, and what their answers must be."""

import base64
import json
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass

ROUTES = ("/chat/completions", "/v1/chat/completions", "/v1/completions")
SECONDS = 60  # after which a server that says nothing is one that hangs
ALLOWED = {200, 400, 401, 404, 405, 413, 415, 422, 503}
_KIND = b"Content-Type: application/json\r\n"
_WORDS = ("messages", "role", "content", "temperature", "top_k", "max_tokens", "seed", "stop", "n")


@dataclass(frozen=True, kw_only=True)
class Shot:
    """What goes over the wire, in pieces, and the canary that only this request knows."""

    pieces: list[bytes]
    canary: str
    leaves: bool  # before it is answered


def make_shot(rng: random.Random) -> Shot:
    """Some request: mostly wrong, sometimes right."""
    canary = f"canary{rng.getrandbits(64):016x}"
    route = rng.choice(ROUTES)
    body = rng.choice(_BODIES)(rng, canary)
    raw = _request(rng, route, body)
    pieces = _split(rng, raw)
    leaves = rng.random() < 0.15
    if leaves:
        pieces = pieces[: rng.randint(0, len(pieces))]
    return Shot(pieces=pieces, canary=canary, leaves=leaves)


def fire(port: int, shot: Shot) -> bytes:
    """Send it; what came back. Raises TimeoutError when the server hangs."""
    received = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        try:
            for piece in shot.pieces:
                connection.sendall(piece)
            if shot.leaves:
                return b""
            connection.shutdown(socket.SHUT_WR)  # half open
            while part := connection.recv(65536):
                received += part
        except TimeoutError:
            raise
        except OSError:  # it was refused before it was sent
            pass
    return bytes(received)


def complaint(shot: Shot, received: bytes, canaries: set[str]) -> str | None:
    """What is wrong with an answer, if anything is. `canaries` are those of all requests."""
    if not received:
        return None  # cut, or we left
    head, _, rest = received.partition(b"\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return f"no HTTP: {head[:80]!r}"
    status = int(head.split()[1])
    if status not in ALLOWED:
        return f"status {status}: {rest[-300:]!r}"
    text = received.decode("utf-8", "replace")
    if status != 200 and shot.canary in text:
        return f"status {status} repeats what was sent"
    if "canary" in text:
        for foreign in canaries - {shot.canary}:
            if foreign in text:
                return f"{foreign} of another request came back"
    return None


def _conversation(rng: random.Random, canary: str) -> dict:
    text = rng.choice([f"echo {canary}", f"echo {canary}\u00e9\U0001f600", canary, "call", "long"])
    return {
        "messages": [{"role": "user", "content": text}],
        "prompt": text,
        "max_tokens": rng.choice([1, 5, 40]),
        "temperature": rng.choice([0, 1, 2]),
        "stream": rng.random() < 0.5,
    }


def _right(rng: random.Random, canary: str) -> bytes:
    return json.dumps(_conversation(rng, canary)).encode()


def _wrong_values(rng: random.Random, canary: str) -> bytes:
    tree = _conversation(rng, canary)
    for _ in range(rng.randint(1, 3)):
        tree[rng.choice([*_WORDS, "stream", "prompt", "logprobs"])] = _value(rng, canary, 3)
    return json.dumps(tree).encode()


def _value(rng: random.Random, canary: str, depth: int):
    plain = [None, True, -1, 0, 10**30, 1.5, float("nan"), float("inf"), "", canary, "\ud800", "\0"]
    if depth and rng.random() < 0.4:
        if rng.random() < 0.5:
            return [_value(rng, canary, depth - 1) for _ in range(rng.randint(0, 3))]
        return {rng.choice([*_WORDS, canary]): _value(rng, canary, depth - 1) for _ in range(2)}
    return rng.choice(plain)


def _broken_json(rng: random.Random, canary: str) -> bytes:
    body = bytearray(_right(rng, canary))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(body))
        match rng.randrange(3):
            case 0:
                body[at] = rng.randrange(256)
            case 1:
                del body[at:]
                body += b" "
            case _:
                body[at:at] = rng.randbytes(rng.randint(1, 4))
    return bytes(body)


def _raw(rng: random.Random, canary: str) -> bytes:
    return rng.choice(
        [
            b"",
            b"[" * rng.choice([10, 5000]),
            b'{"a":' * 2000,
            b'"' + canary.encode() + b'"',
            b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
            b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
            b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
            b'{"messages": [{"role": "user", "content": "' + b"\xf0\x9f\x98" + b'"}]}',
            b"\xff\xfe" + canary.encode("utf-16"),
            rng.randbytes(rng.randint(1, 200)),
        ]
    )


def _huge(rng: random.Random, canary: str) -> bytes:
    match rng.randrange(4):
        case 0:
            return b" " * (2**20 + rng.randint(-1, 1))
        case 1:
            text = canary + "x" * rng.choice([8_000, 50_000])
            return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
        case 2:
            many = [{"role": "user", "content": "x"}] * rng.choice([500, 501, 5000])
            return json.dumps({"messages": many}).encode()
        case _:
            return b'{"messages": ' + b"[" * 100_000


_BODIES: list[Callable[[random.Random, str], bytes]] = [
    *[_right] * 4,
    *[_wrong_values] * 8,
    *[_broken_json] * 5,
    *[_raw] * 4,
    _huge,
]


def _request(rng: random.Random, route: str, body: bytes) -> bytes:
    """HTTP around a body, abused now and then."""
    method = b"POST"
    headers = [b"Host: 127.0.0.1\r\n", b"Connection: close\r\n", _KIND]
    length = len(body)
    if rng.random() < 0.25:
        match rng.randrange(8):
            case 0:
                method = rng.choice([b"GET", b"PUT", b"HEAD", b"BREW", b"post", b"\x00"])
            case 1:
                headers.append(b"X-Long: " + b"a" * rng.choice([1000, 20_000, 70_000]) + b"\r\n")
            case 2:
                headers += [b"X-%d: 1\r\n" % i for i in range(rng.choice([50, 2000]))]
            case 3:
                length = rng.choice([0, length + 5, max(0, length - 1), 10**12, -1])
            case 4:
                headers.append(b"Content-Length: %d\r\n" % (length + 1))
            case 5:
                headers.append(
                    rng.choice([b"\r\n", b"bad header\r\n", b"A\x00: b\r\n", b": x\r\n"])
                )
            case 6:
                route = rng.choice(
                    ["/%ff", "/v1/../stats", "/" + "a" * 5000, "*", "/v1/models/%00"]
                )
            case _:
                junk = base64.b64encode(rng.randbytes(20))
                headers.append(b"Authorization: " + rng.choice([b"Basic ", b"Bearer "]) + junk)
                headers.append(b"\r\nContent-Type: text/plain\r\n")
    head = method + b" " + route.encode() + b" HTTP/1.1\r\n" + b"".join(headers)
    if rng.random() < 0.1:  # in chunks
        chunk = b"%x\r\n" % len(body) + body + b"\r\n" if body else b""
        end = rng.choice([b"0\r\n\r\n", b"0\r\n\r\n", b"zz\r\n", b""])
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + end
    return head + b"Content-Length: %d\r\n\r\n" % length + body


def _split(rng: random.Random, raw: bytes) -> list[bytes]:
    """In pieces, so that characters and headers are cut in the middle."""
    if rng.random() < 0.5:
        return [raw]
    cuts = sorted(rng.randrange(len(raw) + 1) for _ in range(rng.randint(1, 4)))
    return [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
