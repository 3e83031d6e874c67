"""Serve one model until the process is asked to stop: what `nanochat serve` runs."""

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn
import uvloop

from nanochat_core.errors import NanochatError
from nanochat_core.server.app import make_app
from nanochat_core.server.config import ServerConfig
from nanochat_core.server.connection_timeouts import TimedProtocol
from nanochat_core.server.launch import Engines, allow_connections, make_pool, open_port
from nanochat_core.server.metrics import Metrics
from nanochat_core.server.service import Service
from nanochat_core.server.workers.pool import Pool

MAX_HEADER_BYTES = 16 * 1024
SECONDS_BEYOND_DRAIN = 2  # for the error events of streams that are cut
SECONDS_BETWEEN_LOOKS = 0.5
MAX_DOUBLINGS = 5  # of the wait before a failed model is retried
_LOG = logging.getLogger("nanochat_core.server")


@dataclass(frozen=True, kw_only=True)
class Newer:
    """The source of newer models: a function that is polled."""

    find: Callable[[], Path]  # the directory of the model to serve; may be slow (a download)
    every_seconds: float = 30.0


class Server(uvicorn.Server):
    """uvicorn's server, which ends open streams with an error event when it is stopped."""

    def __init__(self, service: Service) -> None:
        self._service = service
        config = uvicorn.Config(
            make_app(service),
            http=TimedProtocol,
            ws="none",
            log_level="error",
            # The middleware logs requests, by route; uvicorn would log their paths and queries.
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=int(service.rules.drain_seconds) + SECONDS_BEYOND_DRAIN,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, and wait for those under way, at most `drain_seconds`."""
        loop = asyncio.get_running_loop()
        # Before uvicorn's own limit, SECONDS_BEYOND_DRAIN later, which cuts connections silently.
        why = "the server is being stopped"
        cut = loop.call_later(self._service.rules.drain_seconds, self._service.fail_all, why)
        await super().shutdown(sockets)
        cut.cancel()


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

    Raises ModelError if the model cannot be loaded, or if the engine processes end again and again
    without one answer; ConfigError if the address is taken.
    """
    _log_to_stderr()
    allow_connections()
    listener = open_port(host, port)  # before the model, which takes a while to load
    with listener, contextlib.suppress(KeyboardInterrupt):  # uvicorn has stopped, and raises it
        uvloop.run(_serve(directory, name, listener, engines, rules, newer))


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
    # The listener's: port 0 was replaced by a free one.
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    sys.stderr.write(f"chat at http://{shown}:{port}\nanswers: {pool.facts.choice}\n")
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
    """Stop the server once its engine processes are no longer restarted."""
    while service.pool.failure is None:
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
    server.should_exit = True


async def follow_newer(
    service: Service, newer: Newer, pool_of: Callable[[Path], Pool], *, served: Path
) -> None:
    """Poll for a newer model and serve it; if that fails, the old model stays.

    Failures are retried with backoff: the store or the memory may have been the cause.
    """
    failures = 0
    while True:
        await asyncio.sleep(newer.every_seconds * 2 ** min(failures, MAX_DOUBLINGS))
        try:
            # First: with a model still leaving, memory would have to hold three.
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
        except Exception:  # noqa: BLE001 - the old model is served whatever is wrong with the new
            failures += 1
            _LOG.exception("the model stays")


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    _LOG.handlers = [handler]
    _LOG.setLevel(logging.INFO)
