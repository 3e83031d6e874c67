"""The Prefect flow `one-stage`: builds on a pool's worker what a run of another flow requested.

Where the worker has a scheduler (NANOCHAT_GANGS), the request becomes a gang of its machines.

Its run ends as Completed, Resumed or Cached, as Failed if a person must fix something, and as
Crashed if the job was lost and a retry may succeed: then the requesting run requests it again.
"""

import contextlib
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled

from flows.building.gangs import build_on_gang
from flows.building.retry import is_retryable
from flows.building.stage_request import StageRequest, build_on_node, stage_of
from flows.orchestration.stage_page import StagePage, final_state
from flows.orchestration.stage_runs import is_cancelled
from flows.orchestration.stage_task import failed
from infra.gangs.open import open_gangs
from infra.placement import default_home
from infra.prefect.supervisor.workers import end_with_worker
from nanochat_core.errors import ConfigError, NanochatError


@flow(name="one-stage", retries=0, persist_result=False)
def one_stage(request: StageRequest) -> Any:
    """Build one stage for a run of another flow. Runs start it themselves; you need not."""
    try:
        return _build(request)
    except NanochatError as error:
        # Crashed is what the dispatching run retries; Failed it passes on to its user.
        return failed(error, is_crash=is_retryable(error))


def _build(request: StageRequest) -> State[Any]:
    run_id = flow_run.get_id()
    end_with_worker()
    if is_cancelled(run_id, before=True):
        return Cancelled(message="cancelled before it began")
    # In the flow's own thread, not in a task's: a signal that ends the flow must end the job too.
    with contextlib.closing(StagePage(stage_of(request), run=request.run)) as reporter:

        def watch(_: str, event: dict[str, Any]) -> None:
            reporter.report(event)

        if (gangs := open_gangs(default_home())) is not None:
            return final_state(
                build_on_gang(
                    request, gangs, watch=watch, is_cancelled=lambda: is_cancelled(run_id)
                )
            )
        if request.nodes > 1:
            raise ConfigError(
                f"{request.ref.name} is requested on {request.nodes} machines, this worker has one",
                hint="start the pool's worker with NANOCHAT_GANGS=slurm or kubernetes, where that "
                "scheduler takes requests",
            )
        return final_state(build_on_node(request, watch=watch))
