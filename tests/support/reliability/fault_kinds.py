"""What each kind of fault of the fault proxy does to a request and its answer.

reset_before     connection reset before anything went to the server
reset_request    ... after half of the request went
drop_response    the server did it; the connection is closed without an answer
reset_response   ... reset after half of the answer
truncate         ... closed after half of the body whose length was announced
shorten          half of the body, and a length that fits it
corrupt          one bit of the answer's body flipped
corrupt_request  one bit of the request's body flipped
status           an error instead of asking the server: 503 SlowDown, 500, 409 ...
status_after     500 although the server did it
hang             the server did it; no answer, the connection stays open
blackhole        nothing goes to the server, no answer
drip             the answer comes in small pieces
duplicate        the request reaches the server twice; the second answer counts
replay_later     a write reaches the server again after some later requests
stale            a read is answered as it was before
error200         200 with an error document as body
"""

import asyncio
import random
import re
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from tests.support.reliability.http_messages import Message

STATUSES = (
    (503, "SlowDown"),
    (503, "ServiceUnavailable"),
    (500, "InternalError"),
    (502, "BadGateway"),
    (504, "GatewayTimeout"),
    (429, "TooManyRequests"),
    (400, "RequestTimeout"),
)
CONFLICT = (409, "ConditionalRequestConflict")  # to conditional writes that meet each other
_WRITES = ("PUT", "POST", "DELETE")


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One request, with all that a fault needs."""

    request: Message
    writer: asyncio.StreamWriter  # of the client's connection
    chance: random.Random
    earlier: Sequence[Message]  # answers to the same question, oldest first
    forward: Callable[[Message], Awaitable[Message]]  # asks the server
    forward_half: Callable[[Message], Awaitable[None]]  # sends it half, then resets
    forward_later: Callable[[Message], None]  # has it sent again


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is left to do for the proxy."""

    answer: Message | None  # to be sent; None when the connection is of no more use
    fired: bool = True
    is_silent: bool = False  # keep the connection open without a word
    drips: bool = False  # send the answer in small pieces


async def _reset_before(it: Exchange) -> Outcome:
    reset(it.writer)
    return Outcome(answer=None)


async def _reset_request(it: Exchange) -> Outcome:
    await it.forward_half(it.request)
    reset(it.writer)
    return Outcome(answer=None)


async def _drop_response(it: Exchange) -> Outcome:
    await it.forward(it.request)
    return Outcome(answer=None)


async def _reset_response(it: Exchange) -> Outcome:
    data = (await it.forward(it.request)).encode()
    it.writer.write(data[: len(data) // 2])
    await it.writer.drain()
    await asyncio.sleep(0.01)  # until it has left: a reset overtakes what has not
    reset(it.writer)
    return Outcome(answer=None)


async def _truncate(it: Exchange) -> Outcome:
    answer = await it.forward(it.request)
    if not answer.body:
        return Outcome(answer=answer, fired=False)
    half = answer.body[: len(answer.body) // 2]
    it.writer.write(replace(answer, body=half, announced=len(answer.body)).encode())
    await it.writer.drain()
    return Outcome(answer=None)


async def _shorten(it: Exchange) -> Outcome:
    answer = await it.forward(it.request)
    half = answer.body[: len(answer.body) // 2]
    return Outcome(answer=replace(answer, body=half), fired=bool(answer.body))


async def _corrupt(it: Exchange) -> Outcome:
    answer = await it.forward(it.request)
    flipped = replace(answer, body=_flip(answer.body, it.chance))
    return Outcome(answer=flipped, fired=bool(answer.body))


async def _corrupt_request(it: Exchange) -> Outcome:
    flipped = replace(it.request, body=_flip(it.request.body, it.chance))
    return Outcome(answer=await it.forward(flipped), fired=bool(it.request.body))


async def _status(it: Exchange) -> Outcome:
    is_conditional = it.request.header("if-none-match") or it.request.header("if-match")
    code, word = it.chance.choice([*STATUSES, CONFLICT] if is_conditional else STATUSES)
    return Outcome(answer=_error(it.request, code, word))


async def _status_after(it: Exchange) -> Outcome:
    await it.forward(it.request)
    return Outcome(answer=_error(it.request, 500, "InternalError"))


async def _hang(it: Exchange) -> Outcome:
    await it.forward(it.request)
    return await _blackhole(it)


async def _blackhole(it: Exchange) -> Outcome:
    return Outcome(answer=None, is_silent=True)


async def _drip(it: Exchange) -> Outcome:
    return Outcome(answer=await it.forward(it.request), drips=True)


async def _duplicate(it: Exchange) -> Outcome:
    await it.forward(it.request)
    return Outcome(answer=await it.forward(it.request))


async def _replay_later(it: Exchange) -> Outcome:
    is_write = it.request.method in _WRITES
    if is_write:
        it.forward_later(it.request)
    return Outcome(answer=await it.forward(it.request), fired=is_write)


async def _stale(it: Exchange) -> Outcome:
    now = await it.forward(it.request)
    if it.request.method not in ("GET", "HEAD"):
        return Outcome(answer=now, fired=False)
    what = _what(now)
    others = [answer for answer in it.earlier if _what(answer) != what]
    if others:
        before = others[-1]
    elif b"<ListBucketResult" in now.body:
        before = replace(now, body=_without_last_entry(now.body))
    else:
        before = _error(it.request, 404, "NoSuchKey")  # as before it was written
    return Outcome(answer=before, fired=_what(before) != what)


async def _error200(it: Exchange) -> Outcome:
    return Outcome(answer=_error(it.request, 200, "InternalError"))


KINDS: dict[str, Callable[[Exchange], Awaitable[Outcome]]] = {
    "reset_before": _reset_before,
    "reset_request": _reset_request,
    "drop_response": _drop_response,
    "reset_response": _reset_response,
    "truncate": _truncate,
    "shorten": _shorten,
    "corrupt": _corrupt,
    "corrupt_request": _corrupt_request,
    "status": _status,
    "status_after": _status_after,
    "hang": _hang,
    "blackhole": _blackhole,
    "drip": _drip,
    "duplicate": _duplicate,
    "replay_later": _replay_later,
    "stale": _stale,
    "error200": _error200,
}


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection by RST instead of FIN."""
    plug = writer.get_extra_info("socket")
    plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _flip(data: bytes, chance: random.Random) -> bytes:
    if not data:
        return data
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]


def _what(answer: Message) -> tuple[int, bytes, int | None, str]:
    """What an answer says, whenever it is said."""
    return answer.status, answer.body, answer.announced, answer.header("etag")


def _without_last_entry(body: bytes) -> bytes:
    entries = re.findall(rb"<Contents>.*?</Contents>", body, re.DOTALL)
    return body.replace(entries[-1], b"") if entries else body


def _error(request: Message, code: int, word: str) -> Message:
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{word}</Code></Error>'.encode()
    return Message(
        first=f"HTTP/1.1 {code} {word}",
        headers=(("Content-Type", "application/xml"), ("x-amz-request-id", "fault")),
        body=b"" if request.method == "HEAD" else body,
        announced=len(body) if request.method == "HEAD" else None,
    )
