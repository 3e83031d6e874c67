"""What commands do with the stack of a home: start its keeper, wait for it, stop everything."""

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

SECONDS_TO_START = 240.0  # a new home on a busy machine takes one
SECONDS_TO_BE_STARTED = 60.0  # longer than a keeper's longest pause
SECONDS_TO_END = 120.0  # runs save, what they left does too
_SECONDS_BETWEEN_LOOKS = 0.1


@dataclass(frozen=True, kw_only=True)
class StackStopped:
    """What `stop_stack` ended."""

    keeper: bool
    workers: tuple[str, ...]  # pools
    server: bool
    leftovers: int  # processes of a keeper that was gone


def start_keeper(home: Path, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the command that keeps the stack, in the background, in a session of its own."""
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
    """The stack of `home`, or None; one that is stopping is waited for, until it is gone."""
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
    """Wait until the stack's workers look for runs; `say` is told what is waited for.

    `keeper` is the process that was started for it; None when it ran before. Raises ServerError
    with the keeper's own words when it gives up, and when it takes too long.
    """
    deadline = time.monotonic() + SECONDS_TO_START
    said = ""
    while time.monotonic() < deadline:
        stack = find_stack(home)
        if stack is None:
            if keeper is None or keeper.poll() is not None:
                raise _gave_up(home, keeper)
        elif stack.state == "ready":
            if keeper is not None and keeper.pid == stack.pid:
                keeper.returncode = 0  # it outlives this command; Popen would warn of that
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
    """Raises ServerError when the stack that runs is not as the options and the environment say."""
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
    """Raise ServerError if a server runs without a keeper, and is not as the environment says.

    A keeper could not start it again as it is; and who sets a password wants one to be asked.
    Raises ServerError also if another version uses the home.
    """
    check_version(home)
    server = find_process(home)
    if server is None or configured_api_url() is not None:
        return
    check_wanted(server)
    if server.database != shown_database(database()):
        raise ServerError(
            f"the server at {server.ui_url} keeps its history in {server.database}",
            hint="name that database too, or stop the server with `nanochat down` first",
        )


def wait_for_kept_server(home: Path) -> None:
    """Where there is a keeper, its server is the keeper's to start: wait until it has."""
    deadline = time.monotonic() + SECONDS_TO_BE_STARTED
    while time.monotonic() < deadline and configured_api_url() is None:
        stack = find_stack(home)
        if stack is None or stack.state in ("stopping", "failed") or find_process(home):
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def stop_stack(home: Path) -> StackStopped:
    """End keeper, workers and server, whatever of them there is; gives what it was.

    Raises ServerError, and ends nothing, if another version uses the home.
    """
    check_version(home)
    stack = read_stack(home)
    keeper = stack.process if stack is not None else None
    workers = tuple(stack.workers) if stack is not None and keeper is not None else ()
    server = find_process(home) is not None
    if keeper is not None:
        _end(keeper)
    leftovers = end_leftovers(home)
    stop_server(home)
    return StackStopped(
        keeper=keeper is not None, workers=workers, server=server, leftovers=leftovers
    )


def keeper_log(home: Path) -> Path:
    """Where the keeper's log lies."""
    return home / "prefect" / "keeper.log"


_WAITS = {
    "starting": "starting the Prefect server; in a new home it takes some ten seconds",
    "registering": "telling it of the deployments, and starting the workers",
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
    """Why there is no keeper, in its own words if there are any."""
    stack = read_stack(home)
    if keeper is not None and stack is not None and stack.pid == keeper.pid and stack.problem:
        return ServerError(stack.problem, hint=stack.hint)
    words = last_line(keeper_log(home))
    return ServerError(
        f"the keeper of {home} ended{f': {words}' if words else ''}",
        hint=f"its log is {keeper_log(home)}",
    )
