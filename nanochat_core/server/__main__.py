"""Serves one model: `python -m nanochat_core.server MODEL_DIR [--port 8000] [--host 127.0.0.1]`."""

import argparse
import contextlib
import socket
import sys
from pathlib import Path

import torch
import uvicorn

from nanochat_core.engine.engine import Engine
from nanochat_core.errors import ConfigError, NanochatError
from nanochat_core.model.checkpoint import load_model
from nanochat_core.server.app import make_app
from nanochat_core.tokenizer.bpe import Tokenizer

SECONDS_TO_STOP = 3


def main(arguments: list[str]) -> int:
    """Serve until stopped; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        name = options.model.resolve().name
        serve(options.model, name=name, host=options.host, port=options.port)
    except NanochatError as error:
        hint = f"hint: {error.hint}\n" if error.hint else ""
        sys.stderr.write(f"error: {error}\n{hint}")
        return 1
    return 0


def serve(directory: Path, *, name: str, host: str, port: int) -> None:
    """Serve the model in `directory`, shown as `name`, until the process is asked to stop.

    Raises ModelError, or ConfigError when the address is taken.
    """
    listener = open_port(host, port)  # before the model, which takes a while to load
    with listener:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        engine = Engine(load_model(directory, device), Tokenizer.load(directory / "tokenizer"))
        app = make_app(engine, name=name)
        sys.stderr.write(f"chat at http://{host}:{listener.getsockname()[1]}\n")
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=SECONDS_TO_STOP)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn has stopped, then raises it again
            uvicorn.Server(config).run(sockets=[listener])


def open_port(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the address is taken or not this machine's."""
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo 65536
        raise ConfigError(f"port is {port}", hint="a number from 0 (any free port) to 65535")
    with contextlib.ExitStack() as on_failure:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, _, _, _, address = found[0]
            listener = on_failure.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host} port {port}: {(error.strerror or str(error)).lower()}",
                hint="give a free port with --port, or 0 for any",
            ) from error
        on_failure.pop_all()
        return listener


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nanochat_core.server", description="Serve a chat model and its page."
    )
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="a model directory")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: reachable from elsewhere")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
