"""Runs a flow from a command: finds or starts a Prefect server, then calls the flow right here.

This module must not import Prefect before its environment is set, so it does so inside functions.
"""

import contextlib
import functools
import importlib
import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from flows.plan.upstream import Pins
from flows.render.terminal import Display
from infra.prefect import server as prefect_server
from infra.prefect.access import check_admitted, check_answers, configured_api_url
from infra.prefect.supervisor.control import wait_for_kept_server

if TYPE_CHECKING:
    from flows.orchestration.pipeline import Outcome

INTERRUPTED = 130  # what a shell reports for Ctrl-C


def run_flow(
    profile: str, *, home: Path, display: Display, pins: Pins | None = None, **parameters: Any
) -> "Outcome":
    """Run the flow with these parameters of it, showing its stages on `display`, which is open.

    Raises ServerError, and whatever the first failed stage raised: a NanochatError for a mistake of
    a person. Raises KeyboardInterrupt when a person or a scheduler stopped it, here or in Prefect's
    pages, after the workers have saved; a second Ctrl-C does not wait for them.
    """
    with ready(home, display, pins):
        from flows.orchestration.pipeline import nanochat

        outcome: Any = nanochat(profile=profile, **parameters)
        return outcome


@contextlib.contextmanager
def ready(home: Path, display: Display, pins: Pins | None = None) -> Generator[None]:
    """Inside, a flow may be called: Prefect knows its server, and this command is the caller.

    `pins` are names upstream that the command has resolved already.
    """
    with stoppable(display):
        connect(home, display.say)
        from flows.orchestration.caller import LocalRun, running_locally

        leave = functools.partial(_leave, display)
        with running_locally(
            LocalRun(home=home, watch=display.watch, leave=leave, pins=pins or {})
        ):
            yield


def _leave(display: Display, why: str | None = None) -> None:
    """End the process at once, with the terminal as it was."""
    if why is not None:
        display.say(why)
    display.close()
    os._exit(INTERRUPTED)


def connect(home: Path, say: Callable[[str], None]) -> str:
    """Point this process's Prefect at its server, started if need be, and import it meanwhile.

    Gives the address of the server's API. Raises ServerError when no server answers.
    """
    configured = configured_api_url()
    if configured is not None:
        prefect_server.adopt_password(home)
        check_answers(configured)
        prefect_server.use_server(home, configured, console_logs=False)
        return configured
    if prefect_server.find_server(home) is None:
        say("starting the Prefect server; in a new home it takes some ten seconds")
    wait_for_kept_server(home)
    server = prefect_server.start_server(home)
    prefect_server.use_server(home, server.api_url, console_logs=False)
    importlib.import_module(
        "flows.orchestration.pipeline"
    )  # takes a second, in which the server comes up
    prefect_server.wait_for_server(home, server)
    check_admitted(server.api_url)
    return server.api_url


@contextlib.contextmanager
def stoppable(display: Display) -> Generator[None]:
    """Inside, SIGTERM is as Ctrl-C, and the second of either ends the process at once.

    The first raises KeyboardInterrupt. Workers of a process that ends at once still save: the
    kernel tells them.
    """
    count = 0

    def on_signal(signum: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            _leave(display)
        display.say("stopping: waiting until the workers have saved (again to leave at once)")
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
