"""One engine in a process of its own: `python -m nanochat_core.server.workers.engine_process FD`.

Messages go over the socket with descriptor FD, see `ipc`. The engine's thread only puts events into
a queue; another thread sends all that wait in one message, so that a step of many answers costs one
write. If the HTTP process ends, this one exits too, whatever the engine is doing.
"""

import importlib
import os
import queue
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from nanochat_core.engine.requests import (
    ENGINE_FAILED,
    EndEvent,
    Event,
    Request,
    SamplingParams,
)
from nanochat_core.errors import NanochatError
from nanochat_core.server.workers.ipc import ModelFacts, Spec, frame, pack_event, receive_message

if TYPE_CHECKING:  # tests run another engine here, which need not load torch
    from nanochat_core.engine.engine import Engine
    from nanochat_core.engine.sequences import RequestHandle

FAILED = 70  # exit status after a failure of the engine; EX_SOFTWARE of sysexits.h


def main(arguments: list[str]) -> int:
    """Load the model that the first message names, then answer until the HTTP process ends."""
    connection = socket.socket(fileno=int(arguments[0]))
    incoming = connection.makefile("rb")
    tree = receive_message(incoming)
    if tree is None:
        return 0
    spec = Spec(**tree)
    # Nothing reads the socket while the model loads.
    threading.Thread(target=_end_with_peer, args=(connection,), daemon=True).start()
    module, _, name = spec.maker.partition(":")
    try:
        engine, facts = getattr(importlib.import_module(module), name)(spec)
        # An exception in the engine's thread alone would leave a process that never answers.
        threading.excepthook = _die
        engine.start()
    except NanochatError as error:
        connection.sendall(frame(["refused", str(error), error.hint]))
        return 1
    _answer(engine, facts, incoming, connection)
    return 0


def open_engine(spec: Spec) -> "tuple[Engine, ModelFacts]":
    """Open the engine of the model directory in `spec`. Raises ModelError or ConfigError."""
    import torch

    from nanochat_core.engine.engine import Engine
    from nanochat_core.engine.runners.choose import Choice
    from nanochat_core.model.checkpoint import load_model
    from nanochat_core.runtime.hardware.device import use_device
    from nanochat_core.tokenizer.bpe import Tokenizer

    torch.set_num_threads(spec.num_threads)
    directory, device = Path(spec.directory), torch.device(spec.device)
    use_device(device)
    model = load_model(directory, device)
    tokenizer = Tokenizer.load(directory / "tokenizer")
    tokenizer.check_model(model.config.vocab_size)
    chosen = list[Choice]()
    engine = Engine(
        model,
        tokenizer,
        precision=spec.precision,
        num_slots=spec.num_slots,
        on_choice=chosen.append,
    )
    # Opens the runner. A model that kills the process, by its memory say, does so before "ready".
    engine.generate_batch([tokenizer.bos], max_tokens=1)
    facts = ModelFacts(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        sequence_len=model.config.sequence_len,
        num_slots=spec.num_slots,
        precision=chosen[0].precision,
        runner=chosen[0].runner,
        choice=str(chosen[0]),
    )
    return engine, facts


def _end_with_peer(connection: socket.socket) -> None:
    """Exit if the HTTP process ends before it has sent anything more; else return."""
    try:
        is_over = not connection.recv(1, socket.MSG_PEEK)
    except ConnectionError:  # it left something unread
        is_over = True
    if is_over:
        os._exit(0)


def _die(failed: threading.ExceptHookArgs) -> None:
    """Exit the process after an exception in a thread, so that the pool restarts it."""
    if failed.exc_value is not None:
        traceback.print_exception(failed.exc_value)
    sys.stderr.flush()
    os._exit(FAILED)


def _answer(
    engine: "Engine", facts: ModelFacts, incoming: BinaryIO, connection: socket.socket
) -> None:
    outbox: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
    connection.sendall(frame(["ready", vars(facts)]))
    threading.Thread(target=_send, args=(outbox, connection), daemon=True).start()
    handles: dict[int, RequestHandle] = {}
    while (message := receive_message(incoming)) is not None:
        kind, number, *rest = message
        if kind == "generate":
            try:
                handles[number] = _submit(engine, number, rest[0], outbox)
            except NanochatError as error:
                end = EndEvent(sample=-1, reason="failed", error=str(error))
                outbox.put(pack_event(number, end))
        elif (handle := handles.pop(number, None)) and kind == "cancel":  # else it has ended
            handle.cancel()
    # Not a normal exit, which would wait for the engine's threads in the middle of a long step.
    os._exit(0)


def _submit(
    engine: "Engine",
    number: int,
    fields: dict[str, Any],
    outbox: "queue.SimpleQueue[list[Any]]",
) -> "RequestHandle":
    """Submit the request with these fields of an EngineRequest."""

    def sink(event: Event) -> None:
        if (
            isinstance(event, EndEvent)
            and event.reason == "failed"
            and event.error != ENGINE_FAILED
        ):
            # An exception's own text may quote a prompt or a path: log it, but do not send it.
            sys.stderr.write(f"the engine failed: {event.error}\n")
            event = EndEvent(sample=event.sample, reason="failed", error=ENGINE_FAILED)
        outbox.put(pack_event(number, event))

    params = SamplingParams(**fields.pop("params"))
    return engine.submit(Request(sink=sink, params=params, **fields))


def _send(outbox: "queue.SimpleQueue[list[Any]]", connection: socket.socket) -> None:
    try:
        while True:
            # This thread is the only consumer, so a queue that is not empty has an item for it.
            events = [outbox.get()]
            while not outbox.empty():
                events.append(outbox.get_nowait())
            connection.sendall(frame(["events", events]))
    except OSError:  # the HTTP process is gone
        os._exit(0)


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except Exception:  # noqa: BLE001 - whatever it is, the HTTP process must see this one end
        traceback.print_exc()
        status = FAILED
    sys.stderr.flush()
    os._exit(status)
