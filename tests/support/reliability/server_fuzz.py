"""Hostile requests for the chat server, made from a seed, and what their answers must be."""

import base64
import json
import random
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

ECHO_TOKENS = 40  # enough for the canary
ROUTES = ("/chat/completions", "/v1/chat/completions", "/v1/completions")
HALF_OPEN = 0.08  # of the requests that are whole; uvicorn takes them for clients that left
BIGGEST_READ = 60_000  # bytes: a bigger body may be refused, and its connection reset, unread
SECONDS = 60  # after which a server that says nothing is one that hangs
MAX_WRONG = 20  # after which no more is sent
BATCH = 200  # requests that are under way together, of which none may bring another's canary
ALLOWED = {200, 400, 401, 404, 405, 413, 415, 422, 503}
_KIND = b"Content-Type: application/json\r\n"
_WORDS = ("messages", "role", "content", "temperature", "top_k", "max_tokens", "seed", "stop", "n")


@dataclass(frozen=True, kw_only=True)
class Shot:
    """What goes over the wire, in pieces, and the canary that only this request knows."""

    pieces: list[bytes]
    canary: str
    leaves: bool  # before it is answered
    half_closes: bool  # says that it will send no more
    must_answer: bool  # nothing excuses the server
    brings: bool  # the canary, where it is answered


@dataclass(frozen=True, kw_only=True)
class _Http:
    """A request as it goes over the wire."""

    raw: bytes
    is_plain: bool  # HTTP as it should be, around whatever body
    is_whole: bool  # the server does not wait for more


def make_shot(rng: random.Random) -> Shot:
    """Some request: mostly wrong, sometimes right."""
    canary = f"canary{rng.getrandbits(64):016x}"
    route = rng.choice(ROUTES)
    make_body = rng.choice(_BODIES)
    body = make_body(rng, canary)
    http = _request(rng, route, body)
    pieces = _split(rng, http.raw)
    leaves = rng.random() < 0.15
    if leaves:
        pieces = pieces[: rng.randint(0, len(pieces))]
    # Most that lack their end say so: the server would wait for it, and the campaign with it.
    half_closes = rng.random() < (HALF_OPEN if http.is_whole else 0.9)
    must_answer = http.is_plain and len(body) < BIGGEST_READ and not (leaves or half_closes)
    return Shot(
        pieces=pieces,
        canary=canary,
        leaves=leaves,
        half_closes=half_closes,
        must_answer=must_answer,
        brings=must_answer and make_body is _right and _is_echoed(body, canary),
    )


def fire(port: int, shot: Shot) -> bytes:
    """Send it; what came back. Raises TimeoutError when the server hangs."""
    received = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        try:
            for piece in shot.pieces:
                connection.sendall(piece)
            if shot.leaves:
                return b""
            if shot.half_closes:
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                received += part
        except TimeoutError:
            raise
        except OSError:  # it was refused before it was sent
            pass
    return bytes(received)


def complaint(shot: Shot, received: bytes, canaries: set[str]) -> str | None:
    """What is wrong with an answer, if anything is. `canaries` are those of all requests so far."""
    if not received:
        return "no answer" if shot.must_answer else None
    head, _, rest = received.partition(b"\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return f"no HTTP: {head[:80]!r}"
    status = int(head.split()[1])
    if status not in ALLOWED:
        return f"status {status}: {rest[-300:]!r}"
    said = what_it_says(received)
    for foreign in {*_CANARY.findall(said)} & (canaries - {shot.canary}):
        return f"{foreign} of another request came back"
    if status != 200 and shot.canary in said:
        return f"status {status} repeats what was sent"
    if shot.brings and status != 503 and shot.canary not in said:
        return f"status {status} without its own canary: {rest[-300:]!r}"
    return None


def fire_many(
    port: int, threads: ThreadPoolExecutor, seeds: range, canaries: set[str]
) -> tuple[int, list[str]]:
    """Send the requests of these seeds; stop after `MAX_WRONG` wrong answers.

    Return how many brought their canary, and what went wrong.
    """

    def try_one(shot: Shot) -> tuple[bool, str | None]:
        try:
            received = fire(port, shot)
        except TimeoutError:
            return False, f"no end of the answer within {SECONDS} s"
        wrong = complaint(shot, received, canaries)
        return shot.brings and shot.canary in what_it_says(received), wrong

    brought, wrong = 0, list[str]()
    for first in range(seeds.start, seeds.stop, BATCH):
        batch = range(first, min(first + BATCH, seeds.stop))
        shots = [make_shot(random.Random(seed)) for seed in batch]
        canaries |= {shot.canary for shot in shots}
        for seed, (has_own, fault) in zip(batch, threads.map(try_one, shots), strict=True):
            brought += has_own
            wrong += [] if fault is None else [f"request {seed}: {fault}"]
        if len(wrong) >= MAX_WRONG:
            break
    return brought, wrong


def what_it_says(received: bytes) -> str:
    """A response as it is, then the text of each of its choices put together.

    A stream gives the text in as many pieces as it has tokens, so that nothing is found in it as
    it is.
    """
    head, _, body = received.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        body = b"".join(_CHUNK.split(b"\r\n" + body))
    plain = body.decode("utf-8", "replace")
    texts: dict[int, str] = {}
    for line in plain.split("\n"):
        if not line.startswith("data: {"):
            continue
        try:
            event = json.loads(line[len("data: ") :])
        except ValueError:  # cut
            continue
        texts[-1] = texts.get(-1, "") + event.get("token", "")
        for choice in event.get("choices", ()):
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return "\n".join([head.decode("latin-1"), plain, *texts.values()])


_CANARY = re.compile("canary[0-9a-f]{16}")
_CHUNK = re.compile(rb"\r\n[0-9a-f]+\r\n")  # JSON escapes what could be taken for one


def _is_echoed(body: bytes, canary: str) -> bool:
    """Whether the engine without a model answers a right body with the whole canary."""
    tree = json.loads(body)
    return canary in tree["prompt"] and tree["max_tokens"] >= ECHO_TOKENS


def _conversation(rng: random.Random, canary: str) -> dict:
    text = rng.choice([f"echo {canary}", f"echo {canary}\u00e9\U0001f600", canary, "call", "long"])
    return {
        "messages": [{"role": "user", "content": text}],
        "prompt": text,
        "max_tokens": rng.choice([1, 5, ECHO_TOKENS, ECHO_TOKENS]),
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


def _request(rng: random.Random, route: str, body: bytes) -> _Http:
    """HTTP around a body, abused now and then."""
    method = b"POST"
    headers = [b"Host: 127.0.0.1\r\n", b"Connection: close\r\n", _KIND]
    length = len(body)
    is_plain = rng.random() >= 0.25
    if not is_plain:
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
        raw = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + end
        is_right = end == b"0\r\n\r\n"
        return _Http(raw=raw, is_plain=is_plain and is_right, is_whole=bool(end))
    raw = head + b"Content-Length: %d\r\n\r\n" % length + body
    return _Http(raw=raw, is_plain=is_plain, is_whole=length <= len(body))


def _split(rng: random.Random, raw: bytes) -> list[bytes]:
    """In pieces, so that characters and headers are cut in the middle."""
    if rng.random() < 0.5:
        return [raw]
    cuts = sorted(rng.randrange(len(raw) + 1) for _ in range(rng.randint(1, 4)))
    return [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
