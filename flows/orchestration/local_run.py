"""Run a flow inside a command: find or start a Prefect server, then call the flow.

Prefect reads its environment on import, so this module imports it inside functions only, once the
environment is set.
"""

import contextlib
import importlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any

from flows.render.terminal import Display
from infra.placement import ONE_STAGE, unknown_pool
from infra.polling import POLL_SECONDS
from infra.prefect import server as prefect_server
from infra.prefect.access import NO_ANSWER, check_answers
from infra.prefect.flow_runs import find_deployment, running_server
from nanochat_core.build_kernels import build_kernels

INTERRUPTED = 130  # exit status that shells give a process ended by SIGINT: 128 + 2


@contextlib.contextmanager
def ready(home: Path, display: Display, planned: Any = None) -> Generator[None]:
    """Connect Prefect to its server and make this command the local run, so a flow can be called.

    `planned` is what the command has planned for the flow; stages are shown on `display`.
    Raises ServerError, and what the flow raises: a NanochatError for a user's mistake, and
    KeyboardInterrupt if a person or a scheduler stopped the run, here or in Prefect's pages, after
    the workers have saved; a second Ctrl-C does not wait for them.
    """
    with stoppable(display):
        connect(home, display.say)
        from flows.orchestration.caller import LocalRun, running_locally

        with running_locally(LocalRun(home=home, watch=display.watch, planned=planned)):
            yield


def connect(home: Path, say: Callable[[str], None]) -> str:
    """Point Prefect in this process at its server, starting one if needed, and import Prefect.

    Returns the URL of the server's API. Raises ServerError if no server responds, or Prefect's
    client cannot be made.
    """
    logging.raiseExceptions = False  # Prefect writes into the display that logs were not sent
    if (api_url := prefect_server.shared_server(home)) is not None:
        check_answers(api_url)
        prefect_server.use_server(home, api_url)
        return api_url
    if prefect_server.find_server(home) is None:
        say("starting the Prefect server; in a new home it takes some ten seconds")
        # The server uses one core meanwhile. No command waits for the thread at its end.
        threading.Thread(target=build_kernels, daemon=True).start()
    # Set the address before Prefect is imported below: it reads its settings then.
    server = prefect_server.start_server(home)
    prefect_server.use_server(home, server.api_url)
    # The import takes a second, in which the server comes up.
    importlib.import_module("flows.orchestration.pipeline")
    prefect_server.wait_for_server(home, server)
    return server.api_url


def check_pool_exists(home: Path, pool: str) -> None:
    """Raise ConfigError if stages cannot be requested from a pool. Starts no server.

    Raises ServerError if no server runs.
    """
    api_url = running_server(home)
    try:
        found = find_deployment(api_url, f"{ONE_STAGE}/{pool}")
    except NO_ANSWER:
        return  # the flow asks again, and waits while Prefect does not answer
    if found is None:
        raise unknown_pool(pool)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether the frame or a caller of it is of the import system."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def stoppable(display: Display) -> Generator[None]:
    """Handle SIGTERM like Ctrl-C: the first raises KeyboardInterrupt, the second exits at once.

    Workers of a process that exits at once still save: the kernel signals them (PDEATHSIG).
    """
    count, is_repeated = 0, False

    def repeat(signum: int) -> None:
        nonlocal is_repeated
        is_repeated = True
        os.kill(os.getpid(), signum)

    def on_signal(signum: int, frame: FrameType | None) -> None:
        nonlocal count, is_repeated
        is_new, is_repeated = not is_repeated, False
        if is_new:
            count += 1
            # A person who presses again does not want to wait for workers and stores.
            if count > 1:
                display.leave()
                os._exit(INTERRUPTED)  # sys.exit would wait for threads
            display.say("stopping: waiting until the workers have saved (again to leave at once)")
        # An exception inside the import system can leave its lock taken: other threads would wait
        # for it for ever, and the exit of this process for them.
        if not _is_importing(frame):
            raise KeyboardInterrupt
        threading.Timer(POLL_SECONDS, repeat, (signum,)).start()

    # Restored at the end, so that a program that calls this keeps its own handlers.
    before = {each: signal.signal(each, on_signal) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
