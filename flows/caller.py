"""The command that runs a flow in its own process, and how such a flow is stopped.

A worker stops what it runs when somebody presses Cancel, and ends what does not end by itself. A
command has no worker: it does both.
"""

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from prefect.exceptions import CancelledRun, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled

from flows.orders import is_cancelled
from flows.site import Watch
from flows.start import INTERRUPTED
from infra.launch.beside import beside

P = ParamSpec("P")
R = TypeVar("R")

SECONDS_BETWEEN_LOOKS = 5.0  # whether somebody has pressed Cancel, which costs a request each
SECONDS_TO_TELL = 30.0  # Prefect that the run was stopped; its own client tries for eight minutes


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The command that runs the flow in its own process."""

    home: Path
    watch: Watch  # is told what happens to each stage


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


@contextlib.contextmanager
def calling(caller: Caller) -> Generator[None]:
    """Inside, a flow is called by this command; raises KeyboardInterrupt when it was cancelled."""
    CALLER.set(caller)
    try:
        yield
    except CancelledRun:
        raise KeyboardInterrupt from None


def stoppable_by_hand(function: Callable[P, R]) -> Callable[P, R]:
    """The body of a flow that is stopped well in a command; one that a worker runs stays as it is.

    Cancel in Prefect's pages stops it as Ctrl-C does. Then the run is Cancelled, and whoever has
    called the flow gets Prefect's CancelledRun. However it was stopped, the process ends soon, also
    when Prefect's server was stopped too and cannot be told.
    """

    @functools.wraps(function)
    def body(*arguments: P.args, **parameters: P.kwargs) -> R:
        caller = CALLER.get()
        if caller is None:
            return function(*arguments, **parameters)
        with _pressing_ctrl_c(flow_run.get_id(), caller.watch) as cancelled:
            try:
                return function(*arguments, **parameters)
            except (KeyboardInterrupt, TerminationSignal):
                threading.Thread(target=_leave, args=(caller.watch,), daemon=True).start()
                if not cancelled.is_set():
                    raise
                state: Any = Cancelled(message="by hand; what was trained is saved")
                return state

    return body


def _leave(tell: Watch) -> None:
    time.sleep(SECONDS_TO_TELL)
    text = "Prefect's server does not answer: it was not told that the run was stopped"
    tell("run", {"kind": "warning", "text": text})
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def _pressing_ctrl_c(flow_run_id: str | None, tell: Watch) -> Generator[threading.Event]:
    """Inside, Ctrl-C is pressed once the run is cancelled; the event says that it was for that."""
    cancelled = threading.Event()
    context = copy_context()  # in which Prefect looks up its settings

    def watch(over: threading.Event) -> None:
        while not over.wait(SECONDS_BETWEEN_LOOKS):
            if context.run(is_cancelled, flow_run_id) and not over.is_set():
                cancelled.set()
                tell("run", {"kind": "warning", "text": "cancelled in Prefect's pages"})
                os.kill(os.getpid(), signal.SIGINT)
                return

    with beside(watch):
        yield cancelled
