"""What the HTTP process and an engine process say to each other, over a socket pair.

Messages are JSON with its length in four bytes before it. From the HTTP process, the first is the
`Spec`; then

    ["ask", id, Ask as an object]      ["cancel", id]

From the engine process

    ["ready", Facts as an object]      or ["refused", message, hint], and it ends
    ["events", [[id, sample, token, sampled, null | [chosen, [[token, log-probability], ...]]],
                [id, sample, reason, error], ...]]

An end of file at either side means that the other is gone.
"""

import asyncio
import dataclasses
import json
import socket
import struct
from dataclasses import dataclass
from typing import Any, TypeAlias

from nanochat_core.engine.requests import EndEvent, Event, LogProbs, SamplingParams, TokenEvent

_LENGTH = struct.Struct(">I")
MakerName: TypeAlias = str  # module:function, which takes a Spec and returns (engine, Facts)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What an engine process runs."""

    maker: MakerName
    directory: str
    device: str  # "cpu", "cuda:0", ...
    num_threads: int
    precision: str  # see engine/runners.py
    num_slots: int  # answers written at the same time


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What an engine process tells of its model once it is loaded."""

    parameters: int
    sequence_len: int
    num_slots: int
    precision: str
    runner: str  # what computes, see engine/runners.py


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """What to continue, and how: the `Request` of the engine without its sink."""

    prompt: list[int]
    num_samples: int
    max_tokens: int
    draw: SamplingParams
    seed: int
    cache_salt: int
    num_log_probs: int | None = None

    def tree(self) -> dict[str, Any]:
        """As JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> "EngineRequest":
        """From JSON."""
        return cls(**{**tree, "draw": SamplingParams(**tree["draw"])})


def pack_event(number: int, event: Event) -> list[Any]:
    """An event of request `number` as JSON."""
    if isinstance(event, EndEvent):
        return [number, event.sample, event.reason, event.error]
    told = event.log_probs
    return [
        number,
        event.sample,
        event.token,
        int(event.sampled),
        None if told is None else [told.chosen, told.top],
    ]


def unpack_event(packed: list[Any]) -> Event:
    """The event of `pack_event`."""
    if isinstance(packed[2], str):
        _, sample, reason, error = packed
        return EndEvent(sample=sample, reason=reason, error=error)  # pyright: ignore[reportArgumentType]
    _, sample, token, sampled, told = packed
    log_probs = None
    if told is not None:
        log_probs = LogProbs(chosen=told[0], top=tuple((t, p) for t, p in told[1]))
    return TokenEvent(sample=sample, token=token, sampled=bool(sampled), log_probs=log_probs)


def frame(message: Any) -> bytes:
    """A message as it goes over the socket."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


async def read_message(reader: asyncio.StreamReader) -> Any | None:
    """The next message; None when the other side is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return json.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def receive_message(connection: socket.socket) -> Any | None:
    """The same on a blocking socket."""
    try:
        head = _receive_exactly(connection, _LENGTH.size)
        body = head and _receive_exactly(connection, _LENGTH.unpack(head)[0])
    except ConnectionError:
        return None
    return json.loads(body) if body else None


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    """`count` bytes, or none at the end."""
    received = bytearray()
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            return b""
        received += part
    return bytes(received)
