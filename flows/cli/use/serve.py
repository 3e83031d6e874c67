"""`nanochat serve`: serve a model as a web page and an HTTP API."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cyclopts import Group, Parameter

from flows.artifacts.names import find_directory
from flows.cli.models import open_named_model
from flows.cli.options import GpusFlag, ModelName, StoreOptions, device_of
from infra.placement import count_gpus
from nanochat_core.errors import ConfigError
from nanochat_core.interop.hub_files import is_on_hub
from nanochat_core.server.config import Log, Overflow, ServerConfig

_RULES = Group("Access and limits", sort_key=1)


@Parameter(name="*", group=_RULES)
@dataclass(frozen=True, kw_only=True)
class Limits:
    """Access rules and limits of a server.

    Attributes:
        key_file: File with API keys, one a line, of which every request must have one.
        trusted_host: A name that this server goes by; may be repeated.
        allow_origin: A web site whose pages may ask; may be repeated.
        max_waiting: Answers that may wait for each worker.
        max_seconds: For one answer, its wait included.
        overflow: A conversation longer than the context loses its oldest turns, or is 400.
        log: What is written to stderr of each request.
    """

    key_file: Path | None = None
    trusted_host: tuple[str, ...] = ()
    allow_origin: tuple[str, ...] = ()
    max_waiting: int = ServerConfig.max_waiting
    max_seconds: float = ServerConfig.max_seconds
    overflow: Overflow = ServerConfig.overflow
    log: Log = ServerConfig.log


def serve(
    model: ModelName,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    workers: int | None = None,
    slots: int | None = None,
    precision: str = "auto",
    reload_on: str | None = None,
    limits: Limits = Limits(),
    gpus: GpusFlag = None,
    where: StoreOptions = StoreOptions(),
) -> None:
    """Serve a model: a chat page, nanochat's API and OpenAI's. Ctrl-C stops it.

    Args:
        host: Address to listen on; 0.0.0.0 is reachable from elsewhere.
        port: Port to listen on; 0 is any free one.
        workers: Engine processes; default one for each GPU, one on the CPU.
        slots: Answers that a worker writes at the same time.
        precision: Precision of the weights: fp32, bf16, int8, model (its own), or auto: on a CPU
            the faster one of fp32 and bf16, as measured.
        reload_on: A tag or a run: serve the model it stands for as soon as that changes.
    """
    # Before a model is loaded: a directory never changes, so there is nothing to reload.
    is_hub = is_on_hub(model)
    is_path = not is_hub and find_directory(model) is not None
    if (is_path or is_hub) and reload_on:
        raise ConfigError(
            f"{model} is a {'published model' if is_hub else 'directory'}, which nothing replaces",
            hint="give a model in the store, like sft@main, with --reload-on",
        )
    device = device_of(gpus)
    gpus = count_gpus() if gpus is None else gpus
    # Imported after the model is open: FastAPI and the engine take seconds to load.
    directory = open_named_model(where, model)
    from nanochat_core.server.launch import Engines, make_rules
    from nanochat_core.server.serve import Newer
    from nanochat_core.server.serve import serve as serve_directory

    serve_directory(
        directory,
        name=directory.name if is_path else model,
        host=host,
        port=port,
        # One process per GPU; None lets the server choose, which on the CPU is one.
        engines=Engines(
            device="cuda" if device == "cuda" else "cpu",
            workers=workers or (gpus if device == "cuda" else None),
            precision=precision,
            num_slots=slots,
        ),
        rules=make_rules(host, **vars(limits)),
        newer=Newer(find=newer_model(where, model, reload_on)) if reload_on else None,
    )


def newer_model(where: StoreOptions, model: str, name: str) -> Callable[[], Path]:
    """Return a function that opens the model `name` stands for at the time of the call.

    If `model` is of a stage (sft@tiny), that stage of `name` is opened.
    """
    stage, at, _ = model.partition("@")
    wanted = f"{stage}@{name}" if at and "@" not in name else name
    return partial(open_named_model, where, wanted)
