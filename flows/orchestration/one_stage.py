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
from flows.build.stage_request import StageRequest, build_on_node, stage_of
from flows.identity.fingerprint import short
from flows.orchestration.stage_page import StagePage, final_state
from flows.orchestration.stage_task import failed
from nanochat_core.errors import NanochatError


def _name_flow_run() -> str:
    """Return the name of a flow run that was started without one: what it builds."""
    parameters = flow_run.get_parameters()
    name = f"{parameters['stage']}/{short(parameters['fingerprint'])}"
    return name if parameters["nodes"] == 1 else f"{name} node {parameters['node']}"


@flow(name="one-stage", flow_run_name=_name_flow_run, retries=0, persist_result=False)
def one_stage(
    stage: str,
    fingerprint: str,
    inputs: tuple[str, ...],
    profile: str,
    run: str,
    store: str,
    depth: int | None = None,
    overrides: tuple[str, ...] = (),
    force: bool = False,
    gpus: int | None = None,
    nodes: int = 1,
    place: tuple[str, ...] = (),
    strict: bool = False,
    node: int = 0,
) -> Any:
    """Build one stage for a run of another flow. Runs start it themselves; you need not.

    Args:
        stage: The stage to build.
        fingerprint: All 64 hex digits of its fingerprint, as the requesting run computed them.
        inputs: Its inputs, each as stage/fingerprint, in the order of the stage table.
        profile: The profile of the requesting run.
        run: The id of the requesting run.
        store: URL of the artifact store, which this machine must reach too.
        depth: Number of transformer layers, if the run was given one.
        overrides: Changed settings, each as section.name=value.
        force: Build the stage even if its artifact exists.
        gpus: GPUs of each machine, 0 for the CPU; by default all that the profile can fill.
        nodes: Number of machines that build it together.
        place: Changed placement settings, each as name=value.
        strict: Treat code that the fingerprint does not cover as an error.
        node: Index of this machine among them; 0 is the first.
    """
    request = StageRequest(
        stage=stage,
        fingerprint=fingerprint,
        inputs=inputs,
        profile=profile,
        depth=depth,
        overrides=overrides,
        run=run,
        force=force,
        store=store,
        gpus=gpus,
        nodes=nodes,
        place=place,
        strict=strict,
    )
    try:
        return _build(request, node=node)
    except NanochatError as error:
        # Crashed is what the dispatching run retries; Failed it passes on to its user.
        return failed(error, is_crash=is_retryable(error))


def _build(request: StageRequest, *, node: int) -> State[Any]:
    # In the flow's own thread, not in a task's: a signal that ends the flow must end the job too.
    with contextlib.closing(StagePage(stage_of(request), run=request.run)) as reporter:
        built = build_on_node(request, node=node, watch=lambda _, event: reporter.report(event))
        return final_state(built)
