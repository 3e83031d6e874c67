"""Find, start, await and stop the local Prefect server of a home directory.

Prefect runs as a program here and is never imported. The server survives the command that started
it, and is configured only by its environment. HOME/prefect has its record, `server.json`, and its
`password`, which its owner alone can read: a client of Prefect's API can run code as the user of
its workers, and other users of the machine, and web pages in a browser, can reach its port. The
supervisor of `nanochat up` holds HOME/prefect/supervisor.lock, in which its process is named.
"""

import contextlib
import json
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from filelock import FileLock

from infra.polling import wait_until
from infra.prefect.access import AUTH, HOST, WEBHOOK, ServerError, configured_api_url, is_prefect
from infra.prefect.logs import last_line, spawn
from infra.storage.files import writing
from nanochat_core.job import write_json
from nanochat_core.runtime.process_start import ProcessRef, find_process, start_of

PORTS = range(4200, 4300)
SECONDS_TO_START = 240.0  # of a server: 10 s on an idle machine, minutes on a busy one
SECONDS_TO_END = 120.0  # of a supervisor: first runs save, then the processes that they left end
SECONDS_TO_DIE = 10.0  # of a process that was asked to end
# Prefect's variables for the database begin so. The address may have a password in it.
DATABASE = ("PREFECT_SERVER_DATABASE_", "PREFECT_API_DATABASE_")
# Prefect's profiles are in its home, and ours has none: Prefect would warn that it lacks the name.
PROFILE = ("PREFECT_PROFILE", "PREFECT_PROFILES_PATH")
# Settings of a user's own Prefect: our server's pages would show that server's address.
FOREIGN = (AUTH, "PREFECT_API_KEY", "PREFECT_API_URL")
# Of a server that the user started: ours has the home's password, or none.
SERVER_AUTH = "PREFECT_SERVER_API_AUTH_STRING"
_children: set[int] = set()  # servers that this process started, until they are collected


@dataclass(frozen=True, kw_only=True)
class Server:
    """A Prefect server on this machine."""

    port: int
    pid: int
    start: str  # distinguishes the process from a later one with its number

    @property
    def process(self) -> psutil.Process | None:
        """The live process, or None if it ended."""
        return find_process(self.pid, self.start)

    @property
    def ui_url(self) -> str:
        """The address of Prefect's pages."""
        return f"http://{HOST}:{self.port}"

    @property
    def api_url(self) -> str:
        """The address of the API, for Prefect's clients."""
        return f"{self.ui_url}/api"


def find_record(home: Path) -> Server | None:
    """Return the server that last ran for `home`, or None."""
    with contextlib.suppress(OSError, ValueError, TypeError):  # none, or not one of ours
        text = (home / "prefect" / "server.json").read_text(encoding="utf-8")
        return Server(**json.loads(text))
    return None


def find_server(home: Path) -> Server | None:
    """Return the server of `home` if its process lives, whether it answers or not; else None."""
    server = find_record(home)
    if server is None or server.process is not None:
        return server
    if server.pid in _children:
        _children.remove(server.pid)
        os.waitpid(server.pid, os.WNOHANG)  # else it stays a zombie of the supervisor
    return None


def shared_server(home: Path) -> str | None:
    """Return the API of a shared server: PREFECT_API_URL, unless it names the home's own."""
    configured, own = configured_api_url(), find_record(home)
    if configured is None or own is None:
        return configured
    if configured.replace("//localhost:", f"//{HOST}:") != own.api_url:
        return configured
    # Its own also after its end, unless another program, such as a server of the user's, has the
    # port.
    return None if own.process is not None or _is_free(own.port) else configured


def find_supervisor(home: Path) -> psutil.Process | None:
    """Return the process that supervises the home's server and workers; None if there is none."""
    found = ProcessRef.find(supervisor_lock(home))
    return found and find_process(found.pid, found.start)


def start_server(home: Path, *, ports: Sequence[int] = PORTS, guarded: bool = True) -> Server:
    """Return the server of `home`; start it on the first free one of `ports` unless it runs.

    Does not wait until it answers: see `wait_for_server`. A new server requires the home's
    password, or none if `guarded` is False. This process uses the same from then on. Raises
    ServerError if it cannot be started, or if another process, the supervisor, is to restart it.
    """
    directory = home / "prefect"
    with writing(directory, ServerError):
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)  # the history holds the webhook's address and its key
        if home.stat().st_uid == os.geteuid():
            home.chmod(0o700)  # work and logs, also in a home of an earlier version
        # Two commands at once must not start two servers on one SQLite file.
        with FileLock(directory / "start.lock"):
            server = find_server(home)
            if server is None:
                # A server that another command started would have another environment.
                other = find_supervisor(home)
                if other is not None and other.pid != os.getpid():
                    raise ServerError(
                        f"no Prefect server runs; process {other.pid}, `nanochat up`, supervises "
                        "this home",
                        hint="give the same command again in some seconds, or with the "
                        "PREFECT_API_URL of `up`",
                    )
                password = password_path(home)
                if guarded:
                    # Private before it is written, also a copy that other users could read.
                    password.touch(mode=0o600)
                    password.chmod(0o600)
                    if find_password(home) is None:
                        password.write_text(f"nanochat:{secrets.token_urlsafe(24)}\n")
                else:
                    password.unlink(missing_ok=True)
                server = _spawn_server(home, ports)
    adopt_password(home)
    return server


def find_password(home: Path) -> str | None:
    """Return `user:password` of the home's server, or None if it has none."""
    with contextlib.suppress(OSError, ValueError):
        return password_path(home).read_text(encoding="ascii").strip() or None
    return None


def adopt_password(home: Path) -> None:
    """Make this process use the password of the home's server, unless it uses a shared one."""
    if shared_server(home) is not None:
        return
    # A password of the environment is that of another server.
    os.environ.pop(AUTH, None)
    if (password := find_password(home)) is not None:
        os.environ[AUTH] = password


def wait_for_server(
    home: Path,
    server: Server,
    *,
    seconds: float = SECONDS_TO_START,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until `server` answers, or `stop`. Raises ServerError if it ends or takes longer."""
    is_over = wait_until(
        lambda: server.process is None or stop() or _answers(server), seconds=seconds
    )
    what = f"does not answer on port {server.port} after {seconds:g} s"
    if server.process is None:
        what = f"ended while starting: {last_line(log_path(home))}"
    elif is_over:
        return
    raise ServerError(f"the Prefect server {what}", hint=f"its log is {log_path(home)}")


def _answers(server: Server) -> bool:
    # Another program may have taken the port before the server could open it: it must not get the
    # password.
    try:
        sockets = server.process.net_connections(kind="tcp") if server.process else []
    except psutil.Error:
        return False
    ports = [each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN]
    return server.port in ports and is_prefect(server.api_url)


def stop_stack(home: Path) -> bool:
    """End the home's supervisor with its workers, and its server; return whether any ran."""
    # The supervisor first: it ends runs and workers in order, and would restart the server.
    supervisor = find_supervisor(home)
    if supervisor is not None:
        end_process(supervisor, SECONDS_TO_END)
    return stop_server(home) or supervisor is not None


def stop_server(home: Path) -> bool:
    """Stop the server of `home`; return whether one ran. Runs in progress lose it."""
    server = find_server(home)
    if server is None:
        return False
    if (process := server.process) is not None:
        end_process(process, SECONDS_TO_DIE)
    find_server(home)  # collects it, if it is a child of this process
    return True


def end_process(process: psutil.Process, seconds: float) -> None:
    """Send SIGTERM to a process, and kill it if it lives `seconds` later.

    A zombie has ended; psutil's `wait` would wait until its parent, a run perhaps, collects it.
    """
    start = start_of(process.pid)
    try:
        for end in (process.terminate, process.kill):
            end()
            if wait_until(lambda: start is None or start_of(process.pid) != start, seconds=seconds):
                return
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied as error:
        raise ServerError(
            f"process {process.pid} belongs to another user", hint="stop it as that user"
        ) from error


def use_server(home: Path, api_url: str) -> None:
    """Point this process's Prefect at a server. Call it before Prefect is first imported.

    The logs of Prefect and of the flow go to the server only.
    """
    os.environ.update(client_environment(home, api_url, console_logs=False))
    # Jobs inherit this environment, and only the server needs the database.
    for name in [name for name in os.environ if name.startswith(DATABASE) or name in PROFILE]:
        del os.environ[name]
    # A person waits for this process: 30 seconds to report the end of a run, not eight minutes.
    os.environ["PREFECT_CLIENT_MAX_RETRIES"] = "4"


def client_environment(home: Path, api_url: str, *, console_logs: bool) -> dict[str, str]:
    """Return the settings of a Prefect client; without `console_logs` only the server logs."""
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
    }
    if not console_logs:
        environment["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "CRITICAL"
        environment["PREFECT_INTERNAL_LOGGING_LEVEL"] = "CRITICAL"  # a line for each unsent event
    return environment


def _settings(home: Path) -> dict[str, str]:
    """Return the settings that server and clients share."""
    return {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }


def own_environment(*, is_shared: bool = False) -> dict[str, str]:
    """Return this process's environment without what our server and workers must not see."""
    # At a shared server the PREFECT_... variables of the user are meant for the workers.
    unwanted = {WEBHOOK, SERVER_AUTH, *PROFILE, *(() if is_shared else FOREIGN)}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in unwanted and not name.startswith(DATABASE)
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
        "PREFECT_UI_STATIC_DIRECTORY": str(home / "prefect" / "pages"),
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


def _is_free(port: int, claim: socket.socket | None = None) -> bool:
    """Return whether no program listens on a port; with a UDP socket, whether it got the port."""
    with contextlib.suppress(OSError, OverflowError), socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((HOST, port))
        if claim is not None:
            claim.bind((HOST, port))
        return True
    return False


def _spawn_server(home: Path, ports: Sequence[int]) -> Server:
    """Start the server on the first free port. Raises ServerError if there is none."""
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST]
    # The server opens its TCP port seconds after its start. Until its end it has the UDP port of
    # that number, so no server of another home that starts meanwhile chooses the same.
    with socket.socket(type=socket.SOCK_DGRAM) as claim:
        if (port := next((port for port in ports if _is_free(port, claim)), None)) is None:
            raise ServerError(
                f"none of the ports {ports[0]} to {ports[-1]} is free for the Prefect server",
                hint="close a program that listens there",
            )
        process = spawn(
            [*command, "--port", str(port)],
            log=log_path(home),
            environment=_server_environment(home, port),
            inherited=[claim.fileno()],
        )
    start = start_of(process.pid) or ""  # "": it has ended already
    server = Server(port=port, pid=process.pid, start=start)
    try:
        write_record(home, server)
    except BaseException:  # no command could find it, and it would have the port
        process.kill()
        process.wait()
        raise
    _children.add(process.pid)
    process.returncode = 0  # else Popen warns that the process outlives this command
    return server


def write_record(home: Path, server: Server) -> None:
    """Write the record where commands look for it."""
    (home / "prefect").mkdir(parents=True, exist_ok=True)
    write_json(home / "prefect" / "server.json", asdict(server))


def password_path(home: Path) -> Path:
    """Return the path of the password of a home's server."""
    return home / "prefect" / "password"


def supervisor_lock(home: Path) -> Path:
    """Return the path of the lock that the supervisor holds."""
    return home / "prefect" / "supervisor.lock"


def log_path(home: Path) -> Path:
    """Return the path of the server's log."""
    return home / "prefect" / "server.log"
