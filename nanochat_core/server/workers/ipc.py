"""The messages between the HTTP process and an engine process, over a socket pair.

Messages are JSON with its length in four bytes before it. From the HTTP process, the first is the
`Spec`; then

    ["generate", id, EngineRequest as an object]   ["cancel", id]   ["forget", id]: it has ended

From the engine process

    ["ready", ModelFacts as an object]      or ["refused", message, hint], and it exits
    ["events", [[id, sample, token, sampled, null | [chosen, [[token, log-probability], ...]]],
                [id, sample, reason, error], ...]]

An end of file at either side means that the other process has ended.
"""

import asyncio
import json
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

from nanochat_core.engine.requests import EndEvent, Event, LogProbs, SamplingParams, TokenEvent

_LENGTH = struct.Struct(">I")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The model and settings of an engine process."""

    maker: str  # module:function, which takes a Spec and returns (engine, ModelFacts)
    directory: str
    device: str  # "cpu", "cuda:0", ...
    num_threads: int
    precision: str  # see engine/runners/choose.py
    num_slots: int  # answers written at the same time


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """An engine process's report of its model once it is loaded."""

    parameters: int
    sequence_len: int
    num_slots: int
    precision: str
    runner: str  # what computes, see engine/runners/choose.py
    choice: str  # of both, with its reason and memory, for people


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """The engine's `Request` without its sink, as it is sent to an engine process."""

    prompt: list[int]
    num_samples: int
    max_tokens: int
    params: SamplingParams
    seed: int
    cache_salt: int
    num_log_probs: int | None = None


def pack_event(number: int, event: Event) -> list[Any]:
    """Return an event of request `number` as JSON values."""
    if isinstance(event, EndEvent):
        return [number, event.sample, event.reason, event.error]
    probs = event.log_probs
    return [
        number,
        event.sample,
        event.token,
        int(event.sampled),
        None if probs is None else [probs.chosen, probs.top],
    ]


def unpack_event(packed: list[Any]) -> Event:
    """Return the event that `pack_event` packed."""
    if isinstance(packed[2], str):  # a reason, so an EndEvent; a token is an integer
        _, sample, reason, error = packed
        return EndEvent(sample=sample, reason=reason, error=error)  # pyright: ignore[reportArgumentType]
    _, sample, token, sampled, probs = packed
    log_probs = None
    if probs is not None:
        log_probs = LogProbs(chosen=probs[0], top=tuple((t, p) for t, p in probs[1]))
    return TokenEvent(sample=sample, token=token, sampled=bool(sampled), log_probs=log_probs)


def frame(message: Any) -> bytes:
    """Return a message's bytes on the socket."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


async def read_message(reader: asyncio.StreamReader) -> Any | None:
    """Read the next message; None means that the other process has ended."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return json.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def receive_message(stream: BinaryIO) -> Any | None:
    """Read the next message of a socket's file; None means that the other process has ended."""
    try:
        (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
        body = stream.read(length)
    except (ConnectionError, struct.error):
        return None
    return json.loads(body) if len(body) == length else None
