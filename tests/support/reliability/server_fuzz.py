"""Hostile requests for the chat server, made from a seed, and what their answers must be."""

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
SECONDS = 60  # after which a server that says nothing is one that hangs
MAX_WRONG = 20  # after which no more is sent
BATCH = 200  # requests that are under way together, of which none may bring another's canary
ALLOWED = {200, 400, 401, 404, 405, 413, 415, 422, 503}
_KIND = b"Content-Type: application/json\r\n"


@dataclass(frozen=True, kw_only=True)
class Shot:
    """What goes over the wire, in pieces, and the canary that only this request knows."""

    pieces: list[bytes]
    canary: str
    leaves: bool  # before it is answered
    half_closes: bool  # says that it will send no more
    must_answer: bool  # nothing excuses the server
    brings: bool  # the canary, where it is answered


def make_shot(rng: random.Random) -> Shot:
    """Some request: mostly wrong, sometimes right."""
    canary = f"canary{rng.getrandbits(64):016x}"
    make_body = rng.choice(_BODIES)
    body = make_body(rng, canary)
    raw, is_plain, is_whole = _request(rng, body)
    pieces = _split(rng, raw)
    leaves = rng.random() < 0.15
    if leaves:
        pieces = pieces[: rng.randint(0, len(pieces))]
    # Most that lack their end say so: the server would wait for it, and the campaign with it.
    half_closes = rng.random() < (HALF_OPEN if is_whole else 0.9)
    must_answer = is_plain and not (leaves or half_closes)
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


def _right(rng: random.Random, canary: str) -> bytes:
    text = rng.choice([f"echo {canary}", f"echo {canary}\u00e9\U0001f600", canary, "call", "long"])
    return json.dumps(
        {
            "messages": [{"role": "user", "content": text}],
            "prompt": text,
            "max_tokens": rng.choice([1, 5, ECHO_TOKENS, ECHO_TOKENS]),
            "temperature": rng.choice([0, 1, 2]),
            "stream": rng.random() < 0.5,
        }
    ).encode()


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
    quoted = b'"' + canary.encode() + b'"'
    content = rng.choice([b'"\\ud800"', b'"\xf0\x9f\x98"', quoted + b"," + quoted, b"1e999"])
    return rng.choice(
        [
            b"",
            b"[" * rng.choice([10, 5000]),
            quoted,
            b'{"messages": [{"role": "user", "content": ' + content + b"}]}",
            b"\xff\xfe" + canary.encode("utf-16"),
            rng.randbytes(rng.randint(1, 200)),
        ]
    )


# Wrong values, and bodies that are too large, are tried by test_described.py and test_guard.py.
_BODIES: tuple[Callable[[random.Random, str], bytes], ...] = (
    *([_right] * 8),
    *([_broken_json] * 8),
    *([_raw] * 5),
)


def _request(rng: random.Random, body: bytes) -> tuple[bytes, bool, bool]:
    """Return HTTP around a body, abused now and then.

    And whether it is as it should be, and so whole that the server does not wait for more.
    """
    method, route, length = b"POST", rng.choice(ROUTES), len(body)
    headers = [b"Host: 127.0.0.1\r\n", b"Connection: close\r\n", _KIND]
    is_plain = rng.random() >= 0.25
    if not is_plain:
        match rng.randrange(6):
            case 0:
                method = rng.choice([b"GET", b"PUT", b"HEAD", b"BREW", b"post", b"\x00"])
            case 1:
                headers.append(b"X-Long: " + b"a" * rng.choice([1000, 20_000, 70_000]) + b"\r\n")
            case 2:
                headers += [b"X-%d: 1\r\n" % i for i in range(rng.choice([50, 2000]))]
            case 3:
                length = rng.choice([0, length + 5, max(0, length - 1), 10**12, -1])
            case 4:
                second = b"Content-Length: %d\r\n" % (length + 1)
                odd = [b"\r\n", b"bad header\r\n", b"A\x00: b\r\n", b": x\r\n", second]
                headers.append(rng.choice(odd))
            case _:
                route = rng.choice(
                    ["/%ff", "/v1/../stats", "/" + "a" * 5000, "*", "/v1/models/%00"]
                )
    head = method + b" " + route.encode() + b" HTTP/1.1\r\n" + b"".join(headers)
    if rng.random() < 0.1:  # in chunks
        chunk = b"%x\r\n" % len(body) + body + b"\r\n" if body else b""
        end = rng.choice([b"0\r\n\r\n", b"0\r\n\r\n", b"zz\r\n", b""])
        raw = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + end
        return raw, is_plain and end == b"0\r\n\r\n", bool(end)
    raw = head + b"Content-Length: %d\r\n\r\n" % length + body
    return raw, is_plain, length <= len(body)


def _split(rng: random.Random, raw: bytes) -> list[bytes]:
    """In pieces, so that characters and headers are cut in the middle."""
    if rng.random() < 0.5:
        return [raw]
    cuts = sorted(rng.randrange(len(raw) + 1) for _ in range(rng.randint(1, 4)))
    return [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
