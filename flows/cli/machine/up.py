"""`nanochat up`: start the Prefect server and its workers, and register all deployments.

`up` starts itself again with --foreground as a background process, the supervisor, which starts the
server and the workers, restarts them after a crash and stops them on a signal.
"""

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from flows.cli.options import StoreOptions
from flows.cli.output import login_line, print_line, print_lines, print_warning
from infra.placement import check_pool_name
from nanochat_core.errors import ConfigError

if TYPE_CHECKING:
    from infra.prefect.records import Stack

POOLS = ("cpu", "gpu")
# -P: without it Python imports a folder called `flows` in the current directory instead of ours.
NANOCHAT = (sys.executable, "-P", "-m", "flows.cli.app")
# A process of its own, so that the supervisor, which lives for months, need not import Prefect.
REGISTER = (sys.executable, "-m", "deployments.deploy")


def up(
    *,
    port: Annotated[
        int | None,
        Parameter(help="Port of the server, or else the next free one; default 4200."),
    ] = None,
    pool: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            show_default=False,
            help="Work only for this pool of runs; may be repeated. Default cpu and gpu.",
        ),
    ] = (),
    no_password: Annotated[
        bool,
        Parameter(
            negative="",
            help="A server that every user and program of this machine may use, and run code by, "
            "without a password.",
        ),
    ] = False,
    foreground: Annotated[
        bool,
        Parameter(negative="", help="Stay, and end with Ctrl-C or SIGTERM: for systemd and such."),
    ] = False,
    register: Annotated[
        bool,
        Parameter(
            negative="",
            help="Only register deployments and these pools, also with a shared server; no worker.",
        ),
    ] = False,
    place: StoreOptions = StoreOptions(),  # noqa: B008 - frozen
) -> int:
    """Start the Prefect server, a worker for each pool, and register all deployments.

    They run in the background until `nanochat down`. With PREFECT_API_URL set, only the workers,
    for the server there: register with it once, and after each upgrade, with --register. A pool
    that exists is used, whatever its type: make it first for Kubernetes and the like.

    Registered again, what is out of date changes; what a user set in Prefect's pages stays. With
    NANOCHAT_WEBHOOK in the environment, alerts are posted to that address.
    """
    from infra.prefect.server import adopt_password

    if register and (port is not None or no_password or foreground):
        raise ConfigError(
            "--register starts no server of its own and no worker",
            hint="give --pool alone with it, or leave it out",
        )
    if port is not None and not 0 < port < 1 << 16:
        raise ConfigError(f"--port is {port}", hint="from 1 to 65535")
    pools = pool or POOLS
    for name in pools:
        check_pool_name(name)
    place.open_home()
    if register:
        return _register(place, [name for name in pools if name not in POOLS])
    adopt_password(place.home_path)
    if foreground:
        return _supervise(place, port, pools, guarded=not no_password)
    from infra.prefect.records import find_running
    from infra.prefect.supervisor.control import check_same, start_supervisor, wait_until_ready

    # Asked before the workers start: a worker creates the pool it is missing.
    missing = _what_is_missing(pools)
    stack = find_running(place.home_path)
    supervisor = None
    if stack is not None:
        check_same(place.home_path, stack, port=port)  # raises if it runs with other settings
        print_line("it is up already")
    else:
        _check(place)
        # The same command again: `up` and its options, in the same environment and directory.
        command = [*NANOCHAT, "up", "--foreground", *sys.argv[2:]]
        supervisor = start_supervisor(place.home_path, command)
        print_line("starting server and workers; in a new home it takes some ten seconds")
    stack = wait_until_ready(place.home_path, supervisor)
    print_lines(_lines(stack, place))
    if stack.problem:
        print_warning(f"{stack.problem}; {stack.hint}")
    if missing:
        print_warning(missing)
    return 1 if stack.problem else 0


def _register(place: StoreOptions, pools: Sequence[str]) -> int:
    """Register deployments, and these pools besides ours, with the server; return the exit code."""
    from flows.orchestration.local_run import connect
    from infra.prefect.access import configured_webhook

    # Connect first: it sets PREFECT_API_URL, which Prefect reads when deployments import it.
    api_url = connect(place.home_path, print_line)
    from deployments.deploy import deploy_all, summary

    print_lines(summary(deploy_all(webhook=configured_webhook(), pools=pools)))
    # With the home, which has the password of its server.
    up = shlex.join(["nanochat", "up", *place.argv])
    print_line(f"next         PREFECT_API_URL={api_url} {up}, on each machine that works")
    return 0


def _what_is_missing(pools: tuple[str, ...]) -> str | None:
    """Return a warning if a shared server lacks our pools or deployments, else None."""
    from infra.prefect.access import configured_api_url
    from infra.prefect.supervisor.control import unknown_to

    shared = configured_api_url()
    if shared is None or not (unknown := unknown_to(shared, pools)):
        return None
    others = [name for name in pools if name not in POOLS]
    pools_of = (word for name in others for word in ("--pool", name))
    words = shlex.join(["nanochat", "up", "--register", *pools_of])
    return f"{shared} does not know {', '.join(unknown)}; register them with `{words}`"


def _check(place: StoreOptions) -> None:
    """Raise ServerError for a problem that is better fixed before anything is started."""
    from infra.prefect.access import (
        auth,
        check_answers,
        check_client,
        check_database,
        configured_api_url,
        database,
    )
    from infra.prefect.supervisor.control import check_adoptable

    auth()  # raises for a malformed password
    check_client()
    check_adoptable(place.home_path)
    if (shared := configured_api_url()) is not None:
        check_answers(shared)
    elif (url := database()) is not None:
        check_database(url)


def _supervise(
    place: StoreOptions, port: int | None, pools: tuple[str, ...], *, guarded: bool
) -> int:
    """Run the supervisor in this process until a signal stops it."""
    from infra.prefect.access import configured_api_url
    from infra.prefect.server import FIRST_PORT
    from infra.prefect.supervisor.control import check_adoptable
    from infra.prefect.supervisor.supervisor import Supervisor

    check_adoptable(place.home_path)
    if missing := _what_is_missing(pools):  # into the log: systemd has no terminal to warn on
        _log(f"warning: {missing}")
    # `--register` registers with a shared server, once: a machine with an older version would
    # overwrite the deployments of a newer one.
    is_own = configured_api_url() is None
    Supervisor(
        place.home_path,
        port=port or FIRST_PORT,
        pools=pools,
        store=place.store,
        register=[*REGISTER, *(name for name in pools if name not in POOLS)] if is_own else [],
        guarded=guarded,
        log=_log,
    ).run()
    return 0


def _log(text: str) -> None:
    """Write one line to the supervisor's log."""
    with contextlib.suppress(OSError):  # a full disk must not end the supervisor
        sys.stdout.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        sys.stdout.flush()


def _lines(stack: "Stack", place: StoreOptions) -> Iterator[str]:
    """Yield the addresses, workers, logs and next commands of a stack that is up."""
    from infra.prefect.access import AUTH, SQLITE
    from infra.prefect.records import find_process_of_server
    from infra.prefect.supervisor.workers import runs_at_once

    home = place.home_path
    workers = ", ".join(f"{pool} (runs at once: {runs_at_once(pool)})" for pool in stack.workers)
    yield f"Prefect      {stack.ui_url}"
    server = find_process_of_server(home)
    if line := login_line(home):
        yield line
    elif server is not None and server.is_guarded:
        yield f"             it asks for the user:password of {AUTH}"
    elif server is not None:
        yield "             without a password: every user of this machine may run code by it"
    yield f"workers      {workers}"
    if server is not None:
        yield f"history      {home / 'prefect' if server.database == SQLITE else server.database}"
    yield f"logs         {home / 'prefect'}"
    words = shlex.join(place.argv)
    ending = f" {words}" if words else ""
    yield "next         start the deployment nanochat in Prefect's pages, or from here:"
    yield f"             nanochat run tiny{ending}"
    yield f"             nanochat down{ending}   (stops all of it)"
