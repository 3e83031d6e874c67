"""Start the keeper of a home, wait for its stack, and stop everything, for the commands.

The keeper is the supervisor process (supervisor.py); the stack is the keeper, the Prefect server
and the workers.
"""

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from infra.prefect.access import (
    ServerError,
    check_admitted,
    configured_api_url,
    database,
    shown_database,
)
from infra.prefect.logs import keep_short, last_line
from infra.prefect.server import check_version, check_wanted, find_process, stop_server
from infra.prefect.supervisor.processes import end_leftovers
from infra.prefect.supervisor_record import Stack, find_stack, read_stack

SECONDS_TO_START = 240.0  # a new home on a busy machine takes a minute
SECONDS_TO_BE_STARTED = 60.0  # longer than a keeper's longest pause between two starts
SECONDS_TO_END = 120.0  # first the runs save, then the processes that they left
_SECONDS_BETWEEN_LOOKS = 0.1


@dataclass(frozen=True, kw_only=True)
class StackStopped:
    """The processes that `stop_stack` ended."""

    keeper: bool
    workers: tuple[str, ...]  # pools
    server: bool
    leftovers: int  # processes of a keeper that was gone


def start_keeper(home: Path, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the keeper's command in the background, in a session of its own."""
    log = keeper_log(home)
    log.parent.mkdir(parents=True, exist_ok=True)
    keep_short(log)
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def find_going(home: Path, *, say: Callable[[str], None]) -> Stack | None:
    """Return the running stack of `home`, or None; first wait for one that is stopping."""
    deadline = time.monotonic() + SECONDS_TO_END
    said = False
    while (stack := find_stack(home)) is not None and stack.state in ("stopping", "failed"):
        if not said:
            said = True
            say("waiting until an earlier one has stopped")
        if time.monotonic() > deadline:
            raise ServerError(
                f"the keeper of {home} does not stop (process {stack.pid})",
                hint="`nanochat down` ends it",
            )
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return stack


def wait_until_ready(
    home: Path, keeper: subprocess.Popen[bytes] | None, *, say: Callable[[str], None]
) -> Stack:
    """Wait until the stack's workers poll for runs; log progress with `say`.

    `keeper` is the process that was started for it; None means that it ran before. Raises
    ServerError with the keeper's own message if it gives up, and if it takes too long.
    """
    deadline = time.monotonic() + SECONDS_TO_START
    said = ""
    while time.monotonic() < deadline:
        stack = find_stack(home)
        # A keeper writes its record only once it runs: none yet is an error only if it has ended.
        if stack is None:
            if keeper is None or keeper.poll() is not None:
                raise _gave_up(home, keeper)
        elif stack.state == "ready":
            if keeper is not None and keeper.pid == stack.pid:
                keeper.returncode = 0  # else Popen warns that the process outlives this command
            return stack
        elif stack.state != said and stack.state in _WAITS:
            said = stack.state
            say(_WAITS[said])
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
    shared = configured_api_url()
    if stack.api_url and shared is not None and shared != stack.api_url:
        raise ServerError(f"the stack uses {stack.api_url}, not {shared}", hint=hint)
    if stack.api_url and port is not None and not stack.api_url.endswith(f":{port}/api"):
        raise ServerError(f"the stack is up at {stack.ui_url}, not on port {port}", hint=hint)
    if stack.api_url:
        check_admitted(stack.api_url)


def check_adoptable(home: Path) -> None:
    """Raise ServerError if a server runs without a keeper and differs from the environment.

    Raises ServerError also if another version uses the home.
    """
    check_version(home)
    server = find_process(home)
    if server is None or configured_api_url() is not None:
        return
    # A keeper restarts the server from the environment: another database would lose the history,
    # and a password that is set there must be required at once.
    check_wanted(server)
    if server.database != shown_database(database()):
        raise ServerError(
            f"the server at {server.ui_url} keeps its history in {server.database}",
            hint="name that database too, or stop the server with `nanochat down` first",
        )


def wait_for_kept_server(home: Path) -> None:
    """Wait until the home's keeper, if there is one, has started its server.

    A server that the command started would have the command's environment, not the keeper's.
    """
    deadline = time.monotonic() + SECONDS_TO_BE_STARTED
    while time.monotonic() < deadline and configured_api_url() is None:
        stack = find_stack(home)
        if stack is None or stack.state in ("stopping", "failed") or find_process(home):
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def stop_stack(home: Path) -> StackStopped:
    """End keeper, workers and server, as far as they run; return what was ended.

    Raises ServerError, and ends nothing, if another version uses the home.
    """
    check_version(home)
    stack = read_stack(home)
    keeper = stack.process if stack is not None else None
    workers = tuple(stack.workers) if stack is not None and keeper is not None else ()
    server = find_process(home) is not None
    # The keeper first: it ends runs and workers in order, and would restart the server.
    if keeper is not None:
        _end(keeper)
    leftovers = end_leftovers(home)
    stop_server(home)
    return StackStopped(
        keeper=keeper is not None, workers=workers, server=server, leftovers=leftovers
    )


def keeper_log(home: Path) -> Path:
    """Return the path of the keeper's log."""
    return home / "prefect" / "keeper.log"


_WAITS = {
    "starting": "starting the Prefect server; in a new home it takes some ten seconds",
    "registering": "registering the deployments, and starting the workers",
}


def _end(keeper: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        keeper.terminate()
        try:
            keeper.wait(SECONDS_TO_END)
        except psutil.TimeoutExpired:
            keeper.kill()
            keeper.wait(SECONDS_TO_END)


def _gave_up(home: Path, keeper: subprocess.Popen[bytes] | None) -> ServerError:
    """Return the error of a keeper that ended, with its own message if it left one."""
    stack = read_stack(home)
    if keeper is not None and stack is not None and stack.pid == keeper.pid and stack.problem:
        return ServerError(stack.problem, hint=stack.hint)
    words = last_line(keeper_log(home))
    return ServerError(
        f"the keeper of {home} ended{f': {words}' if words else ''}",
        hint=f"its log is {keeper_log(home)}",
    )
