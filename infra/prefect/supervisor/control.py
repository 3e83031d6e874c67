"""Start the supervisor of a home, wait for its stack, and stop everything, for the commands."""

import contextlib
import subprocess
import time
import urllib.error
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote

import psutil

from infra.prefect.access import (
    ServerError,
    ask,
    check_admitted,
    configured_api_url,
    database,
    shown_database,
)
from infra.prefect.logs import last_line, spawn
from infra.prefect.records import (
    Stack,
    check_version,
    find_process_of_server,
    find_stack,
    read_stack,
)
from infra.prefect.server import check_wanted, stop_server
from infra.prefect.supervisor.processes import end_leftovers

SECONDS_TO_START = 240.0  # a new home on a busy machine takes a minute
SECONDS_TO_BE_STARTED = 60.0  # longer than a supervisor's longest pause between two starts
SECONDS_TO_END = 120.0  # first the runs save, then the processes that they left
_SECONDS_BETWEEN_LOOKS = 0.1
_ANSWER_SECONDS = 20.0  # a busy server reads its database for longer than a health check takes
_FLOW = "/deployments/name/nanochat/nanochat"  # registered together with all the others
_WAITS = {
    "starting": "starting the Prefect server; in a new home it takes some ten seconds",
    "registering": "registering the deployments, and starting the workers",
}


def start_supervisor(home: Path, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the supervisor's command in the background."""
    log = supervisor_log(home)
    log.parent.mkdir(parents=True, exist_ok=True)
    return spawn(command, log=log)


def find_going(home: Path, *, log: Callable[[str], None]) -> Stack | None:
    """Return the running stack of `home`, or None; first wait for one that is stopping."""
    deadline = time.monotonic() + SECONDS_TO_END
    logged = False
    while (stack := find_stack(home)) is not None and stack.state in ("stopping", "failed"):
        if not logged:
            logged = True
            log("waiting until an earlier one has stopped")
        if time.monotonic() > deadline:
            raise ServerError(
                f"the supervisor of {home} does not stop (process {stack.pid})",
                hint="`nanochat down` ends it",
            )
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return stack


def wait_until_ready(
    home: Path, supervisor: subprocess.Popen[bytes] | None, *, log: Callable[[str], None]
) -> Stack:
    """Wait until the stack's workers poll for runs; log progress with `log`.

    `supervisor` is the process that was started for it; None means that it ran before. Raises
    ServerError with the supervisor's own message if it gives up, and if it takes too long.
    """
    deadline = time.monotonic() + SECONDS_TO_START
    logged = ""
    while time.monotonic() < deadline:
        stack = find_stack(home)
        # It writes its record only once it runs: none yet is an error only if it has ended.
        if stack is None:
            if supervisor is None or supervisor.poll() is not None:
                raise _gave_up(home, supervisor)
        elif stack.state == "ready":
            if supervisor is not None and supervisor.pid == stack.pid:
                supervisor.returncode = 0  # else Popen warns that it outlives this command
            return stack
        elif stack.state != logged and stack.state in _WAITS:
            logged = stack.state
            log(_WAITS[logged])
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    raise ServerError(
        f"the stack of {home} is not up after {SECONDS_TO_START:g} s",
        hint=f"the logs are in {home / 'prefect'}",
    )


def check_same(stack: Stack, *, port: int | None) -> None:
    """Raise ServerError if the running stack differs from the options and the environment."""
    hint = "`nanochat down` stops it; then give the same command again"
    wanted = database()
    if wanted is not None and stack.database != shown_database(wanted):
        raise ServerError(
            f"the stack keeps its history in {stack.database or 'a shared server'}, not in "
            f"{shown_database(wanted)}",
            hint=hint,
        )
    if stack.api_url is None:
        return
    shared = configured_api_url()
    if shared is not None and shared != stack.api_url:
        raise ServerError(f"the stack uses {stack.api_url}, not {shared}", hint=hint)
    if port is not None and not stack.api_url.endswith(f":{port}/api"):
        raise ServerError(f"the stack is up at {stack.ui_url}, not on port {port}", hint=hint)
    check_admitted(stack.api_url)


def check_adoptable(home: Path) -> None:
    """Raise ServerError if a server runs without a supervisor and differs from the environment.

    Raises ServerError also if another version uses the home.
    """
    check_version(home)
    server = find_process_of_server(home)
    if server is None or configured_api_url() is not None:
        return
    # A supervisor restarts the server from the environment: another database would lose the
    # history, and a password that is set there must be required at once.
    check_wanted(server)
    if server.database != shown_database(database()):
        raise ServerError(
            f"the server at {server.ui_url} keeps its history in {server.database}",
            hint="name that database too, or stop the server with `nanochat down` first",
        )


def unknown_to(api_url: str, pools: Sequence[str]) -> list[str]:
    """Return, in words, which of these pools and of our deployments a shared server does not know.

    Empty if it does not answer: the caller reports that instead.
    """
    wanted = {f"/work_pools/{quote(name, safe='')}": f"the pool {name}" for name in pools}
    wanted[_FLOW] = "our deployments"
    missing: list[str] = []
    for path, words in wanted.items():
        try:
            ask(api_url, path, seconds=_ANSWER_SECONDS)
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                return []
            missing.append(words)
        except (OSError, ValueError):
            return []
    return missing


def wait_for_own_server(home: Path) -> None:
    """Wait until the home's supervisor, if there is one, has started its server.

    A server that the command started would have the command's environment, not the supervisor's.
    """
    deadline = time.monotonic() + SECONDS_TO_BE_STARTED
    while time.monotonic() < deadline and configured_api_url() is None:
        stack = find_stack(home)
        if stack is None or stack.state in ("stopping", "failed") or find_process_of_server(home):
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def stop_stack(home: Path) -> list[str]:
    """End supervisor, workers and server, as far as they run; return in words what was ended.

    Raises ServerError, and ends nothing, if another version uses the home.
    """
    check_version(home)
    stack = find_stack(home)
    stopped = [f"the worker of {pool}" for pool in stack.workers] if stack is not None else []
    stopped += ["the Prefect server"] if find_process_of_server(home) is not None else []
    # The supervisor first: it ends runs and workers in order, and would restart the server.
    if stack is not None and (supervisor := stack.process) is not None:
        _end(supervisor)
        stopped = stopped or ["the supervisor"]
    if left := end_leftovers(home):
        stopped.append(f"{left} processes left behind")
    stop_server(home)
    return stopped


def supervisor_log(home: Path) -> Path:
    """Return the path of the supervisor's log."""
    return home / "prefect" / "supervisor.log"


def _end(supervisor: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        supervisor.terminate()
        try:
            supervisor.wait(SECONDS_TO_END)
        except psutil.TimeoutExpired:
            supervisor.kill()
            supervisor.wait(SECONDS_TO_END)


def _gave_up(home: Path, supervisor: subprocess.Popen[bytes] | None) -> ServerError:
    """Return the error of a supervisor that ended, with its own message if it left one."""
    stack = read_stack(home)
    if supervisor and stack and stack.pid == supervisor.pid and stack.problem:
        return ServerError(stack.problem, hint=stack.hint)
    words = last_line(supervisor_log(home))
    return ServerError(
        f"the supervisor of {home} ended{f': {words}' if words else ''}",
        hint=f"its log is {supervisor_log(home)}",
    )
