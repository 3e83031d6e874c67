"""The command that runs a flow in its own process, and how such a flow is stopped.

A Prefect worker stops its flow run when the user presses Cancel, and kills a process that does not
exit. A flow that runs inside `nanochat run` has no worker, so this module does both.
"""

import contextlib
import threading
from collections.abc import Callable, Generator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from prefect._internal.control_listener import get_intent
from prefect.exceptions import CancelledRun, TerminationSignal
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, temporary_settings
from prefect.states import Cancelled

from flows.building.context import Watch
from flows.leases import run_lock
from flows.orchestration.client import NOT_ANSWERING
from flows.orchestration.stage_runs import is_cancelled
from infra.launch.background import poll
from infra.launch.torchrun import StageInterrupted
from infra.polling import ANSWER_SECONDS, SLOW_SECONDS
from nanochat_core.errors import first_line

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """The command that runs the flow in its own process."""

    home: Path
    watch: Watch  # receives the events of each stage
    planned: Any = None  # what it has opened and planned for the flow, with its store
    stop: threading.Event = field(default_factory=threading.Event)  # of every BuildContext
    # Of the runs that this process executes, see flows/leases/run_lock.py.
    locks: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    ends: list[Any] = field(default_factory=list[Any])  # what its flow's body returned or raised
    # FINISHED, if the flow returned and Prefect does not know it.
    unreported: list[str] = field(default_factory=list[str])


LOCAL_RUN: ContextVar[LocalRun | None] = ContextVar("caller", default=None)


@contextlib.contextmanager
def running_locally(caller: LocalRun) -> Generator[None]:
    """Make `caller` the context's local run. Raises KeyboardInterrupt if the flow was cancelled."""
    # A context variable, since Prefect calls the flow and passes on only the form's parameters.
    token = LOCAL_RUN.set(caller)
    try:
        # A person waits: a server that hangs gets less than the minute of Prefect's default.
        with temporary_settings({PREFECT_API_REQUEST_TIMEOUT: ANSWER_SECONDS}), caller.locks:
            yield
    except CancelledRun:
        raise KeyboardInterrupt from None
    finally:
        LOCAL_RUN.reset(token)


def call_flow(flow: Callable[P, R], *arguments: P.args, **parameters: P.kwargs) -> R:
    """Call a flow in its local run; return or raise what its body does.

    Prefect's engine would raise an error of its own if it cannot report the end, because its server
    is gone or the run was deleted there. Here that is a warning: the work is done and recorded, and
    the next command reports it (flows/plan/dead_runs.py). Meanwhile Prefect's client repeats the
    report, and then perhaps that of its failure: for half a minute each if connections are refused,
    four minutes in all if a server hangs. A second Ctrl-C ends that.
    """
    try:
        return flow(*arguments, **parameters)
    except NOT_ANSWERING as error:
        caller = LOCAL_RUN.get()
        if caller is None or not caller.ends or (end := caller.ends[-1]) is error:
            raise
        text = f"Prefect does not know that the run has ended: {first_line(error)}"
        caller.watch("run", {"kind": "warning", "text": text})
        if isinstance(end, BaseException):
            raise end from None
        caller.unreported.append(run_lock.FINISHED)
        return end


def end_when_cancelled(body: Callable[[], R]) -> R:
    """Return what a flow's body returns; Cancel in Prefect's pages ends its run as Cancelled.

    In a command Cancel sets the run's `stop`, and the caller of the flow gets Prefect's
    CancelledRun.
    """
    run, caller = flow_run.get_id(), LOCAL_RUN.get()
    state: Any = Cancelled(message="cancelled by the user; the same command resumes it")
    if caller is not None:
        return _end_local(body, run, caller, state)
    if is_cancelled(run, before=True):
        return state
    try:
        return body()
    except TerminationSignal:
        # A process that was too busy to acknowledge the Cancel within a second would be
        # reported as Crashed, and resumed. For any other Prefect's worker ends the run 3 to
        # 6 s later: Cancelled before that, it could be retried, and the worker would end that.
        if get_intent() == "cancel" or not is_cancelled(run):
            raise
        return state


def _end_local(body: Callable[[], R], run: str | None, caller: LocalRun, state: Any) -> R:
    cancelled = threading.Event()
    # Prefect reads its settings from context variables, which a new thread does not inherit.
    context = copy_context()

    def look() -> None:
        if not caller.stop.is_set() and context.run(is_cancelled, run):
            cancelled.set()  # first: what `stop` ends finds it
            caller.stop.set()
            caller.watch("run", {"kind": "warning", "text": "cancelled in Prefect's pages"})

    try:
        # It looks once more at the end: Cancel may have been pressed when all stages were built.
        with poll(look, every=SLOW_SECONDS):
            made = body()
    except (Exception, KeyboardInterrupt, TerminationSignal) as error:
        is_stopped = not isinstance(error, Exception)
        # An impatient Ctrl-C after Cancel: the page says Cancelled.
        if not (cancelled.is_set() and (is_stopped or isinstance(error, StageInterrupted))):
            _note_end(caller, KeyboardInterrupt() if is_stopped else error)
            raise
    else:
        if not cancelled.is_set():
            _note_end(caller, made)
            return made
    _note_end(caller, KeyboardInterrupt())
    return state


def _note_end(caller: LocalRun, end: Any) -> None:
    """Note what the body returned or raised; log a line if Prefect takes long to record it."""
    caller.ends.append(end)
    text = "the run has ended; waiting for Prefect's server to record that"
    event = {"kind": "warning", "text": text}
    waiting = threading.Timer(SLOW_SECONDS, caller.watch, ("run", event))
    waiting.daemon = True
    waiting.start()
    caller.locks.callback(waiting.cancel)
