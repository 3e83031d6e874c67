"""The Prefect flow `one-stage`: builds on a pool's worker what a run of another flow requested.

Its run ends as Completed, Resumed or Cached, as Failed if a person must fix something, and as
Crashed if the job was lost and a retry may succeed: then the requesting run requests it again.
"""

import contextlib
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run

from flows.build.retry import is_retryable
from flows.build.stage_request import NodeRequest, build_on_node, stage_of
from flows.identity.ref import short
from flows.orchestration.forms import takes
from flows.orchestration.stage_page import StagePage, final_state
from flows.orchestration.stage_task import failed
from nanochat_core.errors import NanochatError


def _name_flow_run() -> str:
    """Return the name of a flow run that was started without one: what it builds."""
    parameters = flow_run.get_parameters()
    name = f"{parameters['stage']}/{short(parameters['fingerprint'])}"
    return name if parameters["nodes"] == 1 else f"{name} node {parameters['node']}"


@flow(name="one-stage", flow_run_name=_name_flow_run, retries=0, persist_result=False)
@takes(NodeRequest, with_rules=False)
def one_stage(request: NodeRequest) -> Any:
    """Build one stage for a run of another flow. Runs start it themselves; you need not."""
    try:
        return _build(request)
    except NanochatError as error:
        # Crashed is what the dispatching run retries; Failed it passes on to its user.
        return failed(error, is_crash=is_retryable(error))


def _build(request: NodeRequest) -> State[Any]:
    # In the flow's own thread, not in a task's: a signal that ends the flow must end the job too.
    with contextlib.closing(StagePage(stage_of(request), run=request.run)) as reporter:
        built = build_on_node(
            request, node=request.node, watch=lambda _, event: reporter.report(event)
        )
        return final_state(built)
