"""Serves one model: `python -m nanochat_core.server MODEL_DIR [--port 8000] [--host 127.0.0.1]`."""

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanochat_core.errors import NanochatError
from nanochat_core.server.app import make_app
from nanochat_core.server.config import ServerConfig
from nanochat_core.server.connection_timeouts import Deadlines
from nanochat_core.server.launch import Engines, allow_connections, make_pool, open_port
from nanochat_core.server.metrics import Metrics
from nanochat_core.server.options import engines_of, make_parser, rules_of
from nanochat_core.server.service import Service
from nanochat_core.server.workers.pool import Pool

MAX_HEADER_BYTES = 16 * 1024
SECONDS_BEYOND_DRAIN = 2  # to tell the streams that are cut
SECONDS_BETWEEN_LOOKS = 0.5
MOST_DOUBLINGS = 5  # of the time until what failed is tried again
_LOG = logging.getLogger("nanochat_core.server")


@dataclass(frozen=True, kw_only=True)
class Newer:
    """Where a newer model comes from."""

    find: Callable[[], Path]  # what is to be served by now; it may take its time
    every_seconds: float = 30.0


class Protocol(Deadlines, H11Protocol):
    """HTTP/1.1 with deadlines."""


class Server(uvicorn.Server):
    """uvicorn's, which tells the streams that it cuts when it is asked to stop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        config = uvicorn.Config(
            make_app(service),
            http=Protocol,
            ws="none",
            log_level="error",
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=int(service.rules.drain_seconds) + SECONDS_BEYOND_DRAIN,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, wait for those under way, up to the limit."""
        loop = asyncio.get_running_loop()
        why = "the server is being stopped"
        cut = loop.call_later(self._service.rules.drain_seconds, self._service.fail_all, why)
        await super().shutdown(sockets)
        cut.cancel()


def main(arguments: list[str]) -> int:
    """Serve until stopped; returns the exit code."""
    options = make_parser().parse_args(arguments)
    try:
        serve(
            options.model,
            name=options.model.resolve().name,
            host=options.host,
            port=options.port,
            engines=engines_of(options),
            rules=rules_of(options),
        )
    except NanochatError as error:
        hint = f"hint: {error.hint}\n" if error.hint else ""
        sys.stderr.write(f"error: {error}\n{hint}")
        return 1
    return 0


def serve(
    directory: Path,
    *,
    name: str,
    host: str,
    port: int,
    engines: Engines,
    rules: ServerConfig,
    newer: Newer | None = None,
) -> None:
    """Serve the model in `directory`, shown as `name`, until the process is asked to stop.

    Raises ModelError, also when the engine processes end again and again without one answer, or
    ConfigError when the address is taken.
    """
    _log_to_stderr()
    allow_connections()
    listener = open_port(host, port)  # before the model, which takes a while to load
    with listener, contextlib.suppress(KeyboardInterrupt):  # uvicorn has stopped, and raises it
        asyncio.run(_serve(directory, name, listener, engines, rules, newer))


async def _serve(
    directory: Path,
    name: str,
    listener: socket.socket,
    engines: Engines,
    rules: ServerConfig,
    newer: Newer | None,
) -> None:
    def pool_of(directory: Path) -> Pool:
        return make_pool(directory, engines, max_waiting=rules.max_waiting)

    pool = pool_of(directory)
    await pool.start()
    service = Service(pool, name=name, rules=rules, metrics=Metrics())
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    sys.stderr.write(f"chat at http://{shown}:{port}\n")
    server = Server(service)
    watching = [asyncio.create_task(stop_without_engine(service, server))]
    if newer:
        following = follow_newer(service, newer, pool_of, served=directory)
        watching.append(asyncio.create_task(following))
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in watching:
            task.cancel()
        await service.stop()
    if service.pool.failure:
        raise service.pool.failure


async def stop_without_engine(service: Service, server: uvicorn.Server) -> None:
    """Stop the server once no engine process of its model is started again."""
    while service.pool.failure is None:
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
    server.should_exit = True


async def follow_newer(
    service: Service, newer: Newer, pool_of: Callable[[Path], Pool], *, served: Path
) -> None:
    """Serve whatever is newer as soon as it is there; the old model stays where that fails.

    What failed is tried again, less and less often: it may have been the store, or the memory.
    """
    failures = 0
    while True:
        await asyncio.sleep(newer.every_seconds * 2 ** min(failures, MOST_DOUBLINGS))
        try:
            await service.settled()
            directory = await asyncio.to_thread(newer.find)
            if directory != served:
                await service.swap(lambda found=directory: pool_of(found))
                served = directory
                _LOG.warning("serving %s from now on", directory)
            failures = 0
        except NanochatError as error:
            failures += 1
            _LOG.error("the model stays: %s", error)
        except Exception:  # noqa: BLE001 - whatever it is, the next one may be better
            failures += 1
            _LOG.exception("the model stays")


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    _LOG.handlers = [handler]
    _LOG.setLevel(logging.INFO)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
