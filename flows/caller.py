"""The command that runs a flow in its own process, and what Cancel in Prefect's pages does to it.

A worker stops what it runs when somebody presses Cancel. A command has no worker: it looks itself.
"""

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from prefect.exceptions import CancelledRun
from prefect.runtime import flow_run
from prefect.states import Cancelled

from flows.orders import is_cancelled
from flows.site import Watch
from infra.launch.beside import beside

P = ParamSpec("P")
R = TypeVar("R")

SECONDS_BETWEEN_LOOKS = 5.0  # whether somebody has pressed Cancel, which costs a request each


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


def stopped_by_cancel(function: Callable[P, R]) -> Callable[P, R]:
    """The body of a flow that Cancel in Prefect's pages stops in a command as Ctrl-C does.

    Then the run is Cancelled, and whoever has called the flow gets Prefect's CancelledRun. A flow
    that a worker runs stays as it is.
    """

    @functools.wraps(function)
    def body(*arguments: P.args, **parameters: P.kwargs) -> R:
        caller = CALLER.get()
        if caller is None:
            return function(*arguments, **parameters)
        with _pressing_ctrl_c(flow_run.get_id(), caller.watch) as cancelled:
            try:
                return function(*arguments, **parameters)
            except KeyboardInterrupt:
                if not cancelled.is_set():
                    raise
                state: Any = Cancelled(message="by hand; what was trained is saved")
                return state

    return body


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
