"""The command that runs a flow in its own process, and how such a flow is stopped.

A worker stops what it runs when somebody presses Cancel, and ends what does not end by itself. A
command has no worker: it does both.
"""

import functools
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from prefect.exceptions import CancelledRun, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled

from flows.build.context import Watch
from flows.orchestration.stage_runs import is_cancelled
from flows.plan.upstream import Pins
from infra.launch.background import Work, run_in_background

P = ParamSpec("P")
R = TypeVar("R")

SECONDS_BETWEEN_LOOKS = 5.0  # whether somebody has pressed Cancel, which costs a request each
SECONDS_TO_TELL = 30.0  # Prefect that the run was stopped; its own client tries for eight minutes


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """The command that runs the flow in its own process."""

    home: Path
    watch: Watch  # is told what happens to each stage
    leave: Callable[[str], None]  # says why, and ends the process at once
    pins: Pins = field(default_factory=dict[str, str])  # what it resolved already
    stop: threading.Event = field(default_factory=threading.Event)  # the flow's sites take it
    over: threading.Event = field(default_factory=threading.Event)  # the flow has ended, and told


LOCAL_RUN: ContextVar[LocalRun | None] = ContextVar("caller", default=None)


@contextmanager
def running_locally(caller: LocalRun) -> Generator[None]:
    """Inside, a flow is called by this command; raises KeyboardInterrupt when it was cancelled."""
    token = LOCAL_RUN.set(caller)
    try:
        yield
    except CancelledRun:
        raise KeyboardInterrupt from None
    finally:
        caller.over.set()
        LOCAL_RUN.reset(token)


def cancellable(function: Callable[P, R]) -> Callable[P, R]:
    """The body of a flow that is stopped well in a command; one that a worker runs stays as it is.

    Cancel in Prefect's pages stops it as Ctrl-C does. Then the run is Cancelled, and whoever has
    called the flow gets Prefect's CancelledRun. However it was stopped, once the body has ended the
    process ends soon, also when Prefect's server was stopped too and cannot be told.
    """

    @functools.wraps(function)
    def body(*arguments: P.args, **parameters: P.kwargs) -> R:
        caller = LOCAL_RUN.get()
        if caller is None:
            return function(*arguments, **parameters)
        run = flow_run.get_id()
        cancelled = threading.Event()
        try:
            with run_in_background(_pressing_ctrl_c(run, caller, cancelled)):
                made = function(*arguments, **parameters)
            if not is_cancelled(run):
                return made
        except (KeyboardInterrupt, TerminationSignal):
            threading.Thread(target=_leave, args=(caller,), daemon=True).start()
            if not cancelled.is_set():
                raise
        state: Any = Cancelled(message="by hand; the same command goes on where it was")
        return state

    return body


def _pressing_ctrl_c(run: str | None, caller: LocalRun, cancelled: threading.Event) -> Work:
    """Work that presses Ctrl-C once the run is cancelled, unless it is being stopped already."""
    context = copy_context()  # in which Prefect looks up its settings

    def press_ctrl_c(over: threading.Event) -> None:
        while not over.wait(SECONDS_BETWEEN_LOOKS) and not caller.stop.is_set():
            if context.run(is_cancelled, run) and not (over.is_set() or caller.stop.is_set()):
                cancelled.set()
                os.kill(os.getpid(), signal.SIGINT)
                caller.watch("run", {"kind": "warning", "text": "cancelled in Prefect's pages"})
                return

    return press_ctrl_c


def _leave(caller: LocalRun) -> None:
    if not caller.over.wait(SECONDS_TO_TELL):
        caller.leave("Prefect's server does not answer: it was not told that the run was stopped")
