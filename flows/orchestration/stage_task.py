"""The body of every Prefect task: `flows.build.build` or `flows.orchestration.dispatch`, told to
Prefect.

Prefect's own result cache is off: whether a stage is up to date is decided by its artifact alone. A
reused stage ends in a state named Cached with the artifact's address as its message; one that fails
ends in a state with the error's line and hint, and no traceback, unless the error is ours.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import task_run
from prefect.states import Crashed, Failed
from prefect.utilities.annotations import quote

from flows.artifacts.runs import Run
from flows.build.build import BuildContext, Built, build
from flows.build.retry import MOST_LOSSES, RetryBudget, is_retryable
from flows.orchestration.dispatch import HINT, dispatch
from flows.orchestration.stage_page import StagePage, final_state
from flows.stages import Stage
from infra.launch.torchrun import StageInterrupted
from nanochat_core.errors import NanochatError

P = ParamSpec("P")
R = TypeVar("R")


def message_of(error: NanochatError) -> str:
    """What Prefect shows of an error: its line, and the hint below."""
    return f"{error}{HINT}{error.hint}" if error.hint else str(error)


def failed(error: NanochatError, *, is_crash: bool = False) -> State[Any]:
    """The state of what failed for this reason; whoever asks for its result gets the error."""
    logging.getLogger("prefect.flow_runs").addFilter(_without_traceback)
    made = Crashed if is_crash else Failed
    return made(message=message_of(error), data=error)


def _without_traceback(record: logging.LogRecord) -> bool:
    """A worker's engine logs whatever a flow raises, with its traceback: here the line is all."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, NanochatError):
        record.msg, record.args, record.exc_info = message_of(error), (), None
    return True


def failing_in_a_line(function: Callable[P, R]) -> Callable[P, R]:
    """The body of a flow that fails with the line and the hint of a NanochatError."""

    @functools.wraps(function)
    def body(*arguments: P.args, **parameters: P.kwargs) -> R:
        try:
            return function(*arguments, **parameters)
        except NanochatError as error:
            state: Any = failed(error)  # Prefect takes it for the run's own and raises the error
            return state

    return body


@task(name="stage", cache_policy=NO_CACHE, persist_result=False, retries=0)
def stage_task(
    stage: Stage,
    site: BuildContext,
    run: Run,
    inputs: dict[str, Built],
    attempts: RetryBudget,
    *,
    force: bool,
) -> State[Any]:
    """Build `stage`, order it, or find that it exists; ends in the state that says so."""
    reporter = StagePage(stage, run=site.run_id)
    manifests = {name: built.manifest for name, built in inputs.items()}

    def watch(name: str, event: dict[str, Any]) -> None:
        attempts.note(event)
        site.watch(name, event)
        reporter.report(event)

    here = replace(site, watch=watch)
    with contextlib.closing(reporter):
        try:
            _pause(stage, here, attempts.pause)
            if stage.compute == "gpu" and here.placement.pool is not None:
                built = dispatch(stage, here, run, manifests, force=force)
            else:
                built = build(stage, here, manifests, force=force)
        except NanochatError as error:
            return failed(error)
    return final_state(built)


def _pause(stage: Stage, site: BuildContext, seconds: float) -> None:
    """Wait before a new attempt, holding nothing; a run that is stopped does not wait."""
    if seconds:
        text = f"attempt {task_run.get_run_count()} begins in {seconds:.0f} s"
        site.watch(stage.name, {"kind": "waiting", "text": text})
    if site.stop.wait(seconds):
        raise StageInterrupted(f"{stage.name} was not started: the run is being stopped")


def submit(
    stage: Stage,
    site: BuildContext,
    run: Run,
    inputs: Mapping[str, Any],
    *,
    force: bool,
    retries: int,
    label: str | None = None,
) -> Any:
    """Start `stage` once the futures in `inputs` are there; returns its own future.

    It is started again up to `retries` times when it was lost, anew whenever it came further than
    before. Its task run is called `label`, as the stage unless told.
    """
    attempts = RetryBudget(retries)

    def worth_another(task: Any, task_run: Any, state: State[Any]) -> bool:
        is_worth_it = not site.stop.is_set() and is_retryable(state.data)
        return is_worth_it and attempts.lose(task_run.run_count)

    # No tags: for each one Prefect asks the server for a slot, and may wait two seconds to hear
    # that there is no limit. It types `submit` as taking values, not futures or quoted ones.
    named: Any = stage_task.with_options(
        name=stage.name,
        task_run_name=label or stage.name,
        retries=MOST_LOSSES if retries else 0,
        retry_condition_fn=worth_another,
    )
    return named.submit(
        quote(stage), quote(site), quote(run), dict(inputs), quote(attempts), force=force
    )
