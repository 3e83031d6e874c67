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
from uuid import UUID

from prefect.exceptions import CancelledRun, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed

from flows.building.context import Watch
from flows.orchestration.client import NOT_ANSWERING, quick_client
from flows.orchestration.stage_runs import is_cancelled
from flows.plan.planned import Opened
from infra.launch.background import Work, run_in_background
from infra.launch.torchrun import StageInterrupted
from infra.polling import SLOW_SECONDS
from infra.prefect.access import answers, configured_api_url
from nanochat_core.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

# Time for Prefect's client to report that the run was stopped, while its server does not answer.
SECONDS_TO_REPORT = 30.0


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """The command that runs the flow in its own process."""

    home: Path
    watch: Watch  # receives the events of each stage
    leave: Callable[[str], None]  # logs the reason and exits the process at once
    planned: Opened | None = None  # what it has opened and planned already
    stop: threading.Event = field(default_factory=threading.Event)  # of every BuildContext
    over: threading.Event = field(default_factory=threading.Event)  # ended and reported to Prefect
    # Of the runs that this process executes, see flows/leases/run_lock.py.
    locks: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    # Id of the flow run, and what its body returned or raised.
    ends: list[tuple[str | None, Any]] = field(default_factory=list[tuple[str | None, Any]])


LOCAL_RUN: ContextVar[LocalRun | None] = ContextVar("caller", default=None)


@contextlib.contextmanager
def running_locally(caller: LocalRun) -> Generator[None]:
    """Make `caller` the context's local run. Raises KeyboardInterrupt if the flow was cancelled."""
    # A context variable, since Prefect calls the flow and passes on only the form's parameters.
    token = LOCAL_RUN.set(caller)
    try:
        with caller.locks:
            yield
    except CancelledRun:
        raise KeyboardInterrupt from None
    finally:
        caller.over.set()
        LOCAL_RUN.reset(token)


def call_flow(flow: Callable[P, R], *arguments: P.args, **parameters: P.kwargs) -> R:
    """Call a flow in its local run; return or raise what its body does.

    Prefect's engine would raise an error of its own if it cannot report the end, because its server
    is gone or the run was deleted there. Here that is a warning: the work is done and recorded.
    """
    try:
        return flow(*arguments, **parameters)
    except NOT_ANSWERING as error:
        caller = LOCAL_RUN.get()
        run, end = caller.ends[-1] if caller is not None and caller.ends else (None, error)
        if caller is None or end is error:
            raise
        is_error = isinstance(end, BaseException)
        if is_error or not _complete(run):
            why = str(error) or type(error).__name__
            text = f"Prefect does not know that the run has ended: {why}"
            caller.watch("run", {"kind": "warning", "text": text})
        if is_error:
            raise end from None
        return end


def end_when_cancelled(body: Callable[[], R]) -> R:
    """Return what a flow's body returns; Cancel in Prefect's pages ends its run as Cancelled.

    In a command Cancel sets the run's `stop`, and the caller of the flow gets Prefect's
    CancelledRun. However the flow was stopped, the process exits SECONDS_TO_REPORT after the body's
    end if Prefect's server does not answer by then.
    """
    run, caller = flow_run.get_id(), LOCAL_RUN.get()
    state: Any = Cancelled(message="cancelled by the user; the same command resumes it")
    if caller is None:
        try:
            return body()
        except TerminationSignal:
            # A process that is too busy to acknowledge a Cancel within a second would be
            # reported as Crashed, and resumed.
            if not is_cancelled(run):
                raise
            return state
    cancelled = threading.Event()
    try:
        with run_in_background(_stop_when_cancelled(run, caller, cancelled)):
            made = body()
        # Cancel may have been pressed after the last poll, when all stages were built.
        if not is_cancelled(run):
            _note_end(caller, run, made)
            return made
    except Exception as error:
        if not (cancelled.is_set() and isinstance(error, StageInterrupted)):
            _note_end(caller, run, error)
            raise
        _note_stop(caller, run)
    except (KeyboardInterrupt, TerminationSignal):
        _note_stop(caller, run)
        if not cancelled.is_set():  # else an impatient Ctrl-C: the page says Cancelled
            raise
    return state


def _note_stop(caller: LocalRun, run: str | None) -> None:
    """Record that the run was stopped; leave if Prefect cannot report that."""
    # Prefect reports the final state after the body returns, and may block for minutes.
    threading.Thread(target=_leave, args=(caller,), daemon=True).start()
    caller.ends.append((run, KeyboardInterrupt()))


def _stop_when_cancelled(run: str | None, caller: LocalRun, cancelled: threading.Event) -> Work:
    """Return work that stops the run once it is cancelled in Prefect's pages."""
    # Prefect reads its settings from context variables, which a new thread does not inherit.
    context = copy_context()

    def stop(over: threading.Event) -> None:
        while not over.wait(SLOW_SECONDS) and not caller.stop.is_set():
            if context.run(is_cancelled, run):
                cancelled.set()  # first: what `stop` ends finds it
                caller.stop.set()
                caller.watch("run", {"kind": "warning", "text": "cancelled in Prefect's pages"})

    return stop


def _note_end(caller: LocalRun, run: str | None, end: Any) -> None:
    """Keep what the body returned or raised; say so if reporting it takes long."""

    def say() -> None:
        if not caller.over.wait(SLOW_SECONDS):
            text = "the run has ended; waiting for Prefect's server to record that"
            caller.watch("run", {"kind": "warning", "text": text})

    caller.ends.append((run, end))
    threading.Thread(target=say, daemon=True).start()


def _complete(run: str | None) -> bool:
    """Make a flow run Completed; return whether it is.

    If its server comes back late, Prefect's engine has made it Failed: it could not report before.
    """
    if run is not None:
        with contextlib.suppress(*NOT_ANSWERING, ConfigError), quick_client() as client:
            client.set_flow_run_state(UUID(run), Completed(), force=True)
            return True
    return False


def _leave(caller: LocalRun) -> None:
    api_url = configured_api_url()
    while not caller.over.wait(SECONDS_TO_REPORT):
        # A server that is only busy gets its report; else the page would say Running from now on.
        if api_url is None or not answers(api_url):
            caller.leave(
                "Prefect's server does not answer: it does not know that the run was stopped"
            )
            return
