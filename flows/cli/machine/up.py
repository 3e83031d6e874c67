"""`nanochat up`: run the Prefect server and its workers, and register all deployments."""

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator, Sequence

from flows.cli.options import StoreOptions
from flows.cli.output import password_line, print_line, print_lines
from infra.placement import NO_POOL, check_pool_name
from nanochat_core.errors import ConfigError

POOLS = ("cpu", "gpu")
_RESTART_HINT = "`nanochat down` stops it; then give the same command again"
# A process of its own, so that the supervisor, which lives for months, need not import Prefect.
REGISTER = (sys.executable, "-m", "deployments.deploy")


def up(
    *,
    port: int | None = None,
    pool: tuple[str, ...] = (),
    no_password: bool = False,
    register: bool = False,
    place: StoreOptions = StoreOptions(),
) -> None:
    """Run the Prefect server and a worker for each pool until Ctrl-C or `nanochat down`.

    All deployments are registered first. With PREFECT_API_URL set, only the workers run, for the
    server there: register with it once, and after each upgrade, with --register. A pool that exists
    is used, whatever its type: make it first for Kubernetes and the like.

    Registered again, what is out of date changes; what a user set in Prefect's pages stays. With
    NANOCHAT_WEBHOOK in the environment, alerts are posted to that address. Given again, it prints
    the address of the pages and the password that they ask for.

    Args:
        port: Port of the server, or else the next free one; default 4200.
        pool: Work only for this pool of runs; may be repeated. Default cpu and gpu; none: without a
            worker.
        no_password: A server that every user and program of this machine may use, and run code by,
            without a password.
        register: Only register deployments and these pools, also with a shared server; no worker.
    """
    from infra.prefect.access import check_answers
    from infra.prefect.flow_runs import running_server
    from infra.prefect.server import (
        PORTS,
        adopt_password,
        find_server,
        password_path,
        shared_server,
    )
    from infra.prefect.supervisor.supervisor import Supervisor, supervising

    if register and (port is not None or no_password):
        raise ConfigError(
            "--register starts no server of its own and no worker",
            hint="give --pool alone with it, or leave it out",
        )
    if port is not None and not 0 < port < 1 << 16:
        raise ConfigError(f"--port is {port}", hint="from 1 to 65535")
    if NO_POOL in pool and len(pool) > 1:
        raise ConfigError(
            f"--pool {NO_POOL} excludes other pools", hint="give it alone, or omit it"
        )
    pools = () if pool == (NO_POOL,) else pool or POOLS
    for name in pools:
        check_pool_name(name)
    home = place.open_home()
    if register:
        return _register(place, [name for name in pools if name not in POOLS])
    adopt_password(home)
    if (shared := shared_server(home)) is not None:
        check_answers(shared)
    with supervising(home) as is_ours:
        # A server may run without workers: `nanochat run` started it.
        server, of_workers = find_server(home), pool or place.store
        # The same options again are none of another server: a service gives them after its
        # supervisor was killed, whose server stays.
        of_server = port not in (None, server and server.port)
        of_server |= no_password and (server is None or password_path(home).exists())
        if is_ours and of_server and server:
            raise ConfigError("a server runs already", hint=_RESTART_HINT)
        if not is_ours and (of_server or of_workers):
            raise ConfigError("server and workers are up already", hint=_RESTART_HINT)
        if not is_ours:
            running_server(home)
            print_lines(_lines(place, shared))
            return
        print_line("starting server and workers; in a new home it takes some ten seconds")
        # `--register` registers with a shared server, once: a machine with an older version would
        # overwrite the deployments of a newer one.
        names = [name for name in pools if name not in POOLS]
        Supervisor(
            home,
            ports=range(port, port + len(PORTS)) if port else PORTS,
            pools=pools,
            store=place.store,
            register=[*REGISTER, *names] if shared is None else [],
            guarded=not no_password,
            log=_log,
        ).run(lambda api_url: print_lines(_lines(place, shared)))


def _register(place: StoreOptions, pools: Sequence[str]) -> None:
    """Register deployments, and these pools besides ours, with the server."""
    from flows.orchestration.local_run import connect
    from infra.prefect.access import configured_webhook

    # Connect first: it sets PREFECT_API_URL, which Prefect reads when deployments import it.
    api_url = connect(place.home_path, print_line)
    from deployments.deploy import deploy_all, summary

    print_lines(summary(deploy_all(webhook=configured_webhook(), pools=pools)))
    # With the home, which has the password of its server.
    up = shlex.join(["nanochat", "up", *place.argv])
    print_line(f"next         PREFECT_API_URL={api_url} {up}, on each machine that works")


def _log(text: str) -> None:
    """Print one line with the time."""
    with contextlib.suppress(OSError):  # a full disk must not end the supervisor
        print_line(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")


def _lines(place: StoreOptions, shared: str | None) -> Iterator[str]:
    """Yield the addresses, logs and next commands of server and workers that are up."""
    from infra.prefect.server import find_server

    home = place.home_path
    server = find_server(home) if shared is None else None
    if server is not None:
        yield f"Prefect      {server.ui_url}"
        yield password_line(home) or (
            "             without a password: every user of this machine may run code by it"
        )
    elif shared is not None:
        yield f"Prefect      {shared.removesuffix('/api')}"
    yield f"logs         {home / 'prefect'}"
    words = shlex.join(place.argv)
    ending = f" {words}" if words else ""
    yield "next         start the deployment nanochat in Prefect's pages, or in another terminal:"
    yield f"             nanochat run tiny{ending}"
    yield f"             nanochat down{ending}   (or Ctrl-C here: stops all of it)"
