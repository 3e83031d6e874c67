"""The Prefect flow `one-stage`: builds on a pool's worker what a run of another flow ordered.

Its run ends as Completed, Resumed or Cached, as Failed when a person must mend something, and as
Crashed when it was lost: then whoever ordered it orders it again.
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
    """As whoever ordered it named it; one that was started by hand, as what it builds."""
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
    """Build one stage that a run has ordered. Runs order it themselves: nobody starts it by hand.

    Args:
        stage: What is built.
        fingerprint: All 64 digits of it, as the run works them out.
        inputs: Its inputs, each as stage/fingerprint, in the table's order.
        profile: What the run trains.
        run: The id of the run.
        store: URL of the artifact store, which this machine must reach too.
        depth: Number of transformer layers, if the run was given one.
        overrides: Changed settings, each as section.name=value.
        force: Build it although it exists.
        gpus: GPUs of each machine, 0 for the CPU; by default all that the profile can fill.
        nodes: Machines that build it together.
        place: Changed settings of the placement, each as name=value.
        strict: Whether code that a fingerprint does not see is an error.
        node: Which of the machines this one is; 0 is the first.
    """
    order = StageRequest(
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
        return _build(order, node=node)
    except NanochatError as error:
        return failed(error, is_crash=is_retryable(error))


def _build(order: StageRequest, *, node: int) -> State[Any]:
    # In the flow's own thread, not in a task's: a signal that ends the flow ends the job here.
    with contextlib.closing(StagePage(stage_of(order), run=order.run)) as reporter:
        built = build_on_node(order, node=node, watch=lambda _, event: reporter.report(event))
        return final_state(built)
