"""Prepares a server: a model directory's pool, the listening socket, limits, hosts and keys."""

import resource
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from nanochat_core.data.processes import usable_cores
from nanochat_core.errors import ConfigError, ModelError, reason_of
from nanochat_core.server.config import ServerConfig
from nanochat_core.server.workers.ipc import Spec
from nanochat_core.server.workers.pool import HangTimeouts, Pool
from nanochat_core.tokenizer.bpe import Tokenizer
from tasks.user_files import FileFault, read_text

Device: TypeAlias = Literal["auto", "cpu", "cuda"]
MAKER = "nanochat_core.server.workers.engine_process:open_engine"
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")  # of NVIDIA and AMD
SLOTS = {"cpu": 16, "cuda": 64}  # answers at the same time, of one engine process


@dataclass(frozen=True, kw_only=True)
class Engines:
    """The engine processes to start: their number, device and settings."""

    device: Device = "auto"  # "auto": the GPUs, if there are any
    workers: int | None = None  # None: one for each GPU, or one on the CPU
    precision: str = "auto"  # see engine/runners/choose.py
    num_slots: int | None = None  # None: what suits the device
    maker: str = MAKER
    timeouts: HangTimeouts = field(default_factory=HangTimeouts)

    def __post_init__(self) -> None:
        for name, value in (("workers", self.workers), ("slots", self.num_slots)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}", hint="at least 1")


def make_pool(directory: Path, engines: Engines, *, max_waiting: int) -> Pool:
    """Make the pool that answers with the model in `directory`, without starting it.

    Raises ModelError if that is no model directory.
    """
    if not (directory / "config.json").is_file():  # known before a process is started for it
        raise ModelError(
            f"{directory} is not a model: it has no config.json",
            hint="give the directory of a base, mid or chat model (see `nanochat fetch --help`)",
        )
    return Pool(
        make_specs(directory, engines),
        Tokenizer.load(directory / "tokenizer"),
        max_waiting=max_waiting,
        timeouts=engines.timeouts,
    )


def make_specs(directory: Path, engines: Engines) -> Sequence[Spec]:
    """Return a `Spec` for each process. Raises ConfigError if a GPU is asked for and none found."""
    gpus = 0 if engines.device == "cpu" else _count_gpus()
    if engines.device == "cuda" and not gpus:
        raise ConfigError("there is no GPU", hint="leave --device out, or give --device cpu")
    # More workers than GPUs share them in turn.
    workers = engines.workers or max(1, gpus)
    kind = "cuda" if gpus else "cpu"
    # On a CPU no core is kept for the HTTP process: it needs little, and a thread of the kernels
    # that it preempts holds the others up no longer than the piece of work that it has taken.
    threads = max(1, usable_cores() // workers)
    return [
        Spec(
            maker=engines.maker,
            directory=str(directory),
            device=f"cuda:{index % gpus}" if gpus else "cpu",
            num_threads=1 if gpus else threads,
            precision=engines.precision,
            num_slots=engines.num_slots or SLOTS[kind],
        )
        for index in range(workers)
    ]


def open_port(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises ConfigError if the address is taken or not this machine's."""
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo 65536
        raise ConfigError(f"port is {port}", hint="a number from 0 (any free port) to 65535")
    listener = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        # The protocol by name: asyncio's own loop sets TCP_NODELAY only where it is not 0 (uvloop
        # always), and without that Nagle's algorithm and delayed ACKs hold each answer on an open
        # connection for 40 ms.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        # Or a restarted server could not bind while old connections are in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except UnicodeError as error:  # a label of the name is empty or too long
        raise ConfigError(
            f"cannot listen on {host}: it is no name of a host",
            hint="give an address or a name of this machine with --host",
        ) from error
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason_of(error)}",
            hint="give a free port with --port, or 0 for any",
        ) from error
    return listener


def allow_connections() -> None:
    """Raise the limit of open files to the most that the system allows; a shell's is often low."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def make_rules(
    host: str,
    *,
    key_file: Path | None,
    trusted_host: Sequence[str],
    allow_origin: Sequence[str],
    **limits: Any,
) -> ServerConfig:
    """Return the rules of a server on `host`, from the command line's options; `limits` are fields
    of ServerConfig. Raises ConfigError."""
    return ServerConfig(
        keys=read_keys(key_file) if key_file else (),
        hosts=trusted_hosts(host, trusted_host),
        origins=tuple(allow_origin),
        **limits,
    )


def trusted_hosts(host: str, more: Sequence[str]) -> tuple[str, ...]:
    """Return the host names that a server listening on `host` answers to; none: any.

    A server that only this machine reaches knows its names. It must refuse others (DNS rebinding):
    a foreign web page whose name resolves to 127.0.0.1 would count as the same origin.
    """
    if more:
        return ("localhost", "127.0.0.1", "::1", host, *more)
    is_local = host in ("localhost", "::1") or host.startswith("127.")
    return ("localhost", "127.0.0.1", "::1", host) if is_local else ()


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the API keys in a file, one a line. Raises ConfigError if it has none."""
    try:
        lines = read_text(path).splitlines()
    except FileFault as error:
        raise ConfigError(str(error), hint=error.hint) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys or any(not k.isascii() or not k.isprintable() or " " in k for k in keys):
        raise ConfigError(
            f"{path} holds no API key, or a line that is not one",
            hint="a key a line, each of ASCII letters, digits and signs",
        )
    return keys


def _count_gpus() -> int:
    if not any(Path(driver).exists() for driver in _DRIVERS):
        return 0  # and torch, which this process needs for nothing else, is not loaded
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
