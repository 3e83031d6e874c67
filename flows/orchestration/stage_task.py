"""The Prefect task of a stage: `building.build` or `orchestration.dispatch`, with states.

Prefect's own result cache is off: the artifact alone decides whether a stage is up to date. A
reused stage ends in a state named Cached with the artifact's address as its message. One that fails
with a NanochatError ends in a state with the error's line and hint; other errors have a traceback.
"""

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import task_run
from prefect.states import Crashed, Failed
from prefect.utilities.annotations import quote

from flows.artifacts.runs import Run
from flows.building.build import BuildContext, Built, build
from flows.building.retry import MAX_RETRIES, RetryBudget, is_retryable
from flows.orchestration.dispatch import HINT, dispatch
from flows.orchestration.stage_page import StagePage, final_state
from flows.render.text import duration
from flows.stages import Stage
from nanochat_core.errors import NanochatError


def message_of(error: NanochatError) -> str:
    """Return the state message of an error: its line, and the hint below."""
    return f"{error}{HINT}{error.hint}" if error.hint else str(error)


def failed(error: NanochatError, *, is_crash: bool = False) -> State[Any]:
    """Return the state of a run that failed with this error; asking for its result raises it."""
    logging.getLogger("prefect.flow_runs").addFilter(_without_traceback)
    made = Crashed if is_crash else Failed
    return made(message=message_of(error), data=error)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Strip the traceback from a log record of a NanochatError; always return True, to log it."""
    # Prefect's engine logs every error of a flow with its traceback. This is a logging filter.
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, NanochatError):
        record.msg, record.args, record.exc_info = message_of(error), (), None
    return True


@task(name="stage", cache_policy=NO_CACHE, persist_result=False, retries=0)
def stage_task(
    stage: Stage,
    context: BuildContext,
    run: Run,
    inputs: dict[str, Built],
    attempts: RetryBudget,
    *,
    force: bool,
) -> State[Any]:
    """Build `stage`, dispatch it to the pool, or reuse its artifact; return the final state."""
    reporter = StagePage(stage, run=context.run_id)
    manifests = {name: built.manifest for name, built in inputs.items()}

    # The budget sees every event: progress beyond the last attempt restarts its count.
    def watch(name: str, event: dict[str, Any]) -> None:
        attempts.note(event)
        context.watch(name, event)
        reporter.report(event)

    here = replace(context, watch=watch)
    with contextlib.closing(reporter):
        try:
            # Before the build takes a device: other stages can use it during the pause.
            _pause(stage, here, attempts.pause)
            if stage.compute == "gpu" and here.placement.pool is not None:
                built = dispatch(stage, here, run, manifests, force=force)
            else:
                built = build(stage, here, manifests, force=force)
        except NanochatError as error:
            return failed(error)
    return final_state(built)


def _pause(stage: Stage, context: BuildContext, seconds: float) -> None:
    """Wait before a retry, without a device or lease; raise StageInterrupted if stopped."""
    if seconds:
        # Not Prefect's retry delay: that one cannot be cut short when the run is stopped.
        text = f"attempt {task_run.get_run_count()} begins in {duration(seconds)}"
        context.watch(stage.name, {"kind": "waiting", "text": text})
    context.pause(stage.name, seconds)


def submit(
    stage: Stage,
    context: BuildContext,
    run: Run,
    inputs: Mapping[str, Any],
    *,
    force: bool,
    retries: int,
    label: str | None = None,
) -> Any:
    """Start `stage` once the futures in `inputs` are done; return its own future.

    A lost stage is retried up to `retries` times; the count restarts whenever the stage gets
    further than before. `label` is the name of its task run, by default the stage's.
    """
    attempts = RetryBudget(retries)

    def worth_another(task: Any, task_run: Any, state: State[Any]) -> bool:
        is_worth_it = not context.stop.is_set() and is_retryable(state.data)
        return is_worth_it and attempts.lose()

    # No tags: for each one Prefect requests a concurrency slot from the server, and may wait two
    # seconds for the response that it has no limit. MAX_RETRIES leaves the limit to worth_another.
    # Any: Prefect types `submit` as taking values, not futures or quoted ones.
    named: Any = stage_task.with_options(
        name=stage.name,
        task_run_name=label or stage.name,
        retries=MAX_RETRIES if retries else 0,
        retry_condition_fn=worth_another,
    )
    # quote: or Prefect searches every argument for futures, field by field.
    return named.submit(
        quote(stage), quote(context), quote(run), dict(inputs), quote(attempts), force=force
    )
