"""Find, start, await and stop the local Prefect server of a home directory.

Prefect runs as a program here and is never imported. The server survives the command that started
it, and is configured only by its environment. HOME/prefect/server.json records its process and
port.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
from filelock import FileLock

from infra.polling import wait_until
from infra.prefect.access import AUTH, WEBHOOK, ServerError, answers, configured_api_url
from infra.prefect.logs import last_line, spawn
from infra.prefect.password import (
    ensure_password,
    find_password,
    pages_directory,
    remove_password,
)
from infra.prefect.records import (
    HOST,
    Server,
    find_process_of_server,
    find_supervisor,
    server_path,
    write_record,
)
from infra.storage.files import writing
from nanochat_core.runtime.process_start import start_of

FIRST_PORT = 4200
PORTS = 100
SECONDS_TO_START = 240.0  # of a server: 10 s on an idle machine, minutes on a busy one
SECONDS_TO_END = 120.0  # of a supervisor: first runs save, then the processes that they left end
SECONDS_TO_DIE = 10.0  # of a process that was asked to end
# Prefect's variables for the database begin so. The address may have a password in it.
DATABASE = ("PREFECT_SERVER_DATABASE_", "PREFECT_API_DATABASE_")
# Settings of a user's own Prefect: our server's pages would show that server's address.
FOREIGN = (
    AUTH,
    "PREFECT_API_KEY",
    "PREFECT_API_URL",
    "PREFECT_PROFILE",
    "PREFECT_PROFILES_PATH",
)
# Of a server that the user started: ours has the home's password, or none.
SERVER_AUTH = "PREFECT_SERVER_API_AUTH_STRING"


def find_server(home: Path) -> Server | None:
    """Return the server of `home` if it runs and answers, else None."""
    server = find_process_of_server(home)
    return server if server is not None and is_healthy(server) else None


def start_server(home: Path, *, port: int = FIRST_PORT, guarded: bool = True) -> Server:
    """Return the server of `home`; start it on `port` or the next free one unless it runs.

    Does not wait until it answers: see `wait_for_server`. A new server requires the home's
    password, or none if `guarded` is False. This process uses the same from then on.
    """
    directory = _directory(home)
    with writing(directory, ServerError):
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)  # the history holds the webhook's address and its key
        if home.stat().st_uid == os.geteuid():
            home.chmod(0o700)  # work and logs, also in a home of an earlier version
        # Two commands at once must not start two servers on one SQLite file.
        with FileLock(directory / "start.lock"):
            server = find_process_of_server(home)
            if server is None:
                if guarded:
                    ensure_password(home)
                else:
                    remove_password(home)
                server = _spawn_on_free_port(home, port)
    adopt_password(home)
    return server


def adopt_password(home: Path) -> None:
    """Make this process use the password of the home's server, if that is the server it uses.

    Without PREFECT_API_URL a password in the environment is that of another server.
    """
    shared, server = configured_api_url(), find_process_of_server(home)
    is_own = shared is None or (server is not None and server.api_url == shared)
    if is_own and (password := find_password(home)) is not None:
        os.environ[AUTH] = password
    elif shared is None:
        os.environ.pop(AUTH, None)


def wait_for_server(
    home: Path,
    server: Server,
    *,
    seconds: float = SECONDS_TO_START,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until `server` answers, or `stop`. Raises ServerError if it ends or takes longer."""
    is_over = wait_until(
        lambda: server.process is None or stop() or is_healthy(server), seconds=seconds
    )
    if server.process is None:
        raise _did_not_start(home, "ended while starting")
    if not is_over:
        raise _did_not_start(home, f"does not answer on port {server.port} after {seconds:g} s")


def wait_for_own_server(home: Path) -> None:
    """Wait until the home's supervisor, if there is one, has restarted its server.

    A server that the command started would have the command's environment, not the supervisor's.
    Without a record of a server the supervisor works for a shared one, or starts its own just now.
    """
    if configured_api_url() is None and server_path(home).exists():
        wait_until(
            lambda: find_supervisor(home) is None or find_process_of_server(home) is not None,
            seconds=SECONDS_TO_START,
        )


def stop_stack(home: Path) -> bool:
    """End the home's supervisor with its workers, and its server; return whether any ran."""
    # The supervisor first: it ends runs and workers in order, and would restart the server.
    supervisor = find_supervisor(home)
    if supervisor is not None:
        end_process(supervisor, SECONDS_TO_END)
    return stop_server(home) or supervisor is not None


def stop_server(home: Path) -> bool:
    """Stop the server of `home`; return whether one ran. Runs in progress lose it."""
    server = find_process_of_server(home)
    process = server.process if server is not None else None
    if process is not None:
        end_process(process, SECONDS_TO_DIE)
    server_path(home).unlink(missing_ok=True)
    return process is not None


def end_process(process: psutil.Process, seconds: float) -> None:
    """Send SIGTERM to a process, and kill it if it lives `seconds` later.

    A zombie has ended; psutil's `wait` would wait until its parent, a run perhaps, collects it.
    Raises ServerError for another user's process.
    """
    start = start_of(process.pid)
    try:
        for end in (process.terminate, process.kill):
            end()
            if wait_until(lambda: start is None or start_of(process.pid) != start, seconds=seconds):
                with contextlib.suppress(psutil.TimeoutExpired):
                    process.wait(0)  # collects it, if it is a child of this process
                return
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied as error:
        raise ServerError(
            f"process {process.pid} belongs to another user",
            hint="stop it as that user, or give a home of your own with --home",
        ) from error


def use_server(home: Path, api_url: str, *, console_logs: bool) -> None:
    """Point this process's Prefect at a server. Call it before Prefect is first imported.

    Without `console_logs`, the logs of Prefect and of the flow go to the server only.
    """
    os.environ.update(client_environment(home, api_url, console_logs=console_logs))
    for name in [name for name in os.environ if name.startswith(DATABASE)]:
        del os.environ[name]  # jobs inherit this environment, and only the server needs it
    # A person waits for this process: 30 seconds to report the end of a run, not eight minutes.
    os.environ["PREFECT_CLIENT_MAX_RETRIES"] = "4"


def client_environment(home: Path, api_url: str, *, console_logs: bool) -> dict[str, str]:
    """Return the environment variables that `use_server` sets."""
    environment = {
        **_settings(home),
        **({AUTH: os.environ[AUTH]} if AUTH in os.environ else {}),
        "PREFECT_API_URL": api_url,
        # Retries of a request without an answer, their waits doubling from 2 seconds: the end of a
        # run is still reported after a server was down for eight minutes.
        "PREFECT_CLIENT_MAX_RETRIES": "8",
        "PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        # A proxy of the environment would otherwise be used for 127.0.0.1 too.
        # In both spellings: where both are set, Python reads the lower one.
        **dict.fromkeys(("NO_PROXY", "no_proxy"), _without_proxy()),
    }
    if not console_logs:
        environment["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "CRITICAL"
        environment["PREFECT_INTERNAL_LOGGING_LEVEL"] = "CRITICAL"  # a line for each unsent event
    return environment


def _without_proxy() -> str:
    """Return the hosts that no proxy is used for: those of the environment, and this machine."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    if given == "*":  # no proxy at all; next to another name it would mean nothing
        return given
    return ",".join(filter(None, (given, HOST, "localhost")))


def _settings(home: Path) -> dict[str, str]:
    """Return the settings that server and clients share."""
    return {
        "PREFECT_HOME": str(_directory(home)),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }


def own_environment(*, but: Iterable[str] = FOREIGN) -> dict[str, str]:
    """Return this process's environment without what our server and workers must not see."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in {WEBHOOK, SERVER_AUTH, *but} and not name.startswith(DATABASE)
    }


def _server_environment(home: Path, port: int) -> dict[str, str]:
    password = find_password(home)
    return {
        # Events go after a week, runs with their logs and artifacts after 90 days; Prefect's own
        # default keeps runs for ever. A user's own setting wins.
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
        **own_environment(),
        **{name: value for name, value in os.environ.items() if name.startswith(DATABASE)},
        **_settings(home),
        **({} if password is None else {SERVER_AUTH: password}),
        "PREFECT_UI_API_URL": f"http://{HOST}:{port}/api",
        "PREFECT_UI_STATIC_DIRECTORY": str(pages_directory(home)),
        # By default pages of every origin may call the API, and no change needs a token.
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://{HOST}:{port},http://localhost:{port}",
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
        # In memory (the default) leases are lost by a restart, and their holders terminated.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
            "prefect.server.concurrency.lease_storage.filesystem"
        ),
        # The one setting that names a module of ours, which makes transactions on SQLite wait.
        "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": "deployments.write_locks",
        # Seconds that the child runs of a cancelled run may continue.
        "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_LOOP_SECONDS": "5",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    }


def _spawn_on_free_port(home: Path, first: int) -> Server:
    """Start on the first port that no program and no other home has.

    A server opens its port after seconds; until then only its reservation shows that it has it.
    """
    for port in range(first, min(first + PORTS, 1 << 16)):
        if (reservation := _reserve_port(port)) is not None:
            with reservation:
                return _spawn(home, port, reservation=reservation.fileno())
    raise ServerError(
        f"none of the ports {first} to {first + PORTS - 1} is free for the Prefect server",
        hint="close a program that listens there",
    )


def _reserve_port(port: int) -> socket.socket | None:
    """Return a socket that reserves the port for as long as a process has it; None if taken.

    Other programs may still take it.
    """
    reservation = socket.socket(socket.AF_UNIX)
    try:
        # A name without a file, which all users and containers with the same ports see.
        if sys.platform == "linux":
            reservation.bind(f"\0nanochat-flows-port-{port}")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
    except OSError:
        reservation.close()
        return None
    return reservation


def _spawn(home: Path, port: int, *, reservation: int) -> Server:
    process = spawn(
        [
            *(sys.executable, "-m", "prefect", "server", "start"),
            *("--host", HOST, "--port", str(port)),
        ],
        log=log_path(home),
        environment=_server_environment(home, port),
        cwd=_directory(home),  # not the caller's: its prefect.toml or .env would configure it
        pass_fds=[reservation],  # the kernel ends it with the server
    )
    process.returncode = 0  # else Popen warns that the process outlives this command
    server = Server(
        port=port,
        pid=process.pid,
        start=start_of(process.pid) or "",  # "": it has ended already
    )
    write_record(home, server)
    return server


def is_healthy(server: Server) -> bool:
    """Return whether the server answers, and its own process has the port."""
    process = server.process
    if process is None or not answers(server.api_url):
        return False
    # Another program may have taken the port before the server could open it.
    try:
        sockets = process.net_connections(kind="tcp")
    except psutil.Error:
        return False
    return any(s.status == psutil.CONN_LISTEN and s.laddr.port == server.port for s in sockets)


def _did_not_start(home: Path, what: str) -> ServerError:
    """Return the error of a server that failed to start, with the last line of its log."""
    path = log_path(home)
    if words := last_line(path):
        what = f"{what}: {words}"
    return ServerError(f"the Prefect server {what}", hint=f"its log is {path}")


def _directory(home: Path) -> Path:
    return home / "prefect"


def log_path(home: Path) -> Path:
    """Return the path of the server's log."""
    return _directory(home) / "server.log"
