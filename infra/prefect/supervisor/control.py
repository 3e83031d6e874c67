"""Start the supervisor of a home, wait for its stack, and stop everything, for the commands."""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from infra.polling import POLL_SECONDS
from infra.prefect.access import (
    ServerError,
    ask,
    check_admitted,
    configured_api_url,
)
from infra.prefect.logs import last_line, spawn
from infra.prefect.records import (
    Stack,
    find_process_of_server,
    find_stack,
    read_stack,
)
from infra.prefect.server import (
    SECONDS_TO_START,
    START_ANEW,
    check_wanted,
    end_process,
    stop_server,
)

SECONDS_TO_END = 120.0  # first the runs save, then the processes that they left
_FLOW = "/deployments/name/nanochat/nanochat"  # registered together with all the others


def start_supervisor(home: Path, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the supervisor's command in the background."""
    log = supervisor_log(home)
    log.parent.mkdir(parents=True, exist_ok=True)
    return spawn(command, log=log)


def wait_until_ready(home: Path, supervisor: subprocess.Popen[bytes] | None) -> Stack:
    """Wait until the stack's workers poll for runs.

    `supervisor` is the process that was started for it; None means that it ran before. Raises
    ServerError with the supervisor's own message if it gives up, and if it takes too long.
    """
    deadline = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < deadline:
        is_over = supervisor is not None and supervisor.poll() is not None
        stack = find_stack(home)
        # Another supervisor's record: one that is stopping, and that ours waits for.
        if stack is not None and supervisor is not None and stack.pid != supervisor.pid:
            stack = None
        if is_over or (stack is None and supervisor is None):
            raise _gave_up(home, supervisor)
        if stack is not None and stack.state == "ready":
            if supervisor is not None:
                supervisor.returncode = 0  # else Popen warns that it outlives this command
            return stack
        time.sleep(POLL_SECONDS)
    raise ServerError(
        f"the stack of {home} is not up after {SECONDS_TO_START:g} s",
        hint=f"the logs are in {home / 'prefect'}",
    )


def check_same(home: Path, stack: Stack, *, port: int | None) -> None:
    """Raise ServerError if the running stack differs from the options and the environment."""
    if stack.api_url is None:
        return
    server = find_process_of_server(home)
    if server is not None and server.api_url == stack.api_url:
        check_wanted(server)
    shared = configured_api_url()
    if shared is not None and shared != stack.api_url:
        raise ServerError(f"the stack uses {stack.api_url}, not {shared}", hint=START_ANEW)
    if port is not None and not stack.api_url.endswith(f":{port}/api"):
        raise ServerError(f"the stack is up at {stack.ui_url}, not on port {port}", hint=START_ANEW)
    check_admitted(stack.api_url)


def check_adoptable(home: Path) -> None:
    """Raise ServerError if a server runs without a supervisor and differs from the environment."""
    server = find_process_of_server(home)
    if server is not None and configured_api_url() is None:
        # A supervisor restarts the server from the environment: another database would lose the
        # history, and a password that is set there must be required at once.
        check_wanted(server, exactly=True)


def unknown_to(api_url: str, pools: Sequence[str]) -> list[str]:
    """Return, in words, which of these pools and of our deployments a shared server does not know.

    Empty if it does not answer: the caller reports that instead.
    """
    wanted = {f"/work_pools/{quote(name, safe='')}": f"the pool {name}" for name in pools}
    wanted[_FLOW] = "our deployments"
    missing: list[str] = []
    for path, words in wanted.items():
        try:
            if ask(api_url, path, may_lack=True) is None:
                missing.append(words)
        except (OSError, ValueError):
            return []
    return missing


def stop_stack(home: Path) -> list[str]:
    """End supervisor, workers and server, as far as they run; return in words what was ended."""
    stack = find_stack(home)
    stopped = [f"the worker of {pool}" for pool in stack.workers] if stack is not None else []
    stopped += ["the Prefect server"] if find_process_of_server(home) is not None else []
    # The supervisor first: it ends runs and workers in order, and would restart the server.
    if stack is not None and (supervisor := stack.process) is not None:
        end_process(supervisor, SECONDS_TO_END)
        stopped = stopped or ["the supervisor"]
    stop_server(home)
    return stopped


def supervisor_log(home: Path) -> Path:
    """Return the path of the supervisor's log."""
    return home / "prefect" / "supervisor.log"


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
