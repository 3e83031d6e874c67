"""The Prefect flow `nanochat-eval`: evaluates a model again and reports a regression.

However often it runs for the same model and suite, the evaluation is one artifact, so a backlog of
late runs ends as Cached. Each run is recorded in the store as eval-{name}; the records are the
history that a new evaluation is compared with.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefect import flow
from prefect.events import emit_event
from prefect.logging import get_run_logger

from flows.artifacts.runs import Run, new_run
from flows.building.build import BuildContext, Built
from flows.evals.regression import Assessment, Evaluation, assess, history_rows, read_history
from flows.evals.request import EvalRequest
from flows.evals.suite import Rule, check_metric, history_name, open_suite
from flows.identity.manifest import Manifest
from flows.orchestration.caller import cancellable
from flows.orchestration.flow_setup import flow_run_name, open_flow, wait_of_run
from flows.orchestration.forms import takes
from flows.orchestration.pipeline import (
    Outcome,
    run_pipeline,
)
from flows.orchestration.stage_page import BackgroundWriter
from flows.orchestration.stage_task import failing_in_a_line
from flows.render.text import key_of
from flows.run_request import RETRIES, shared
from flows.stages import Stage

COMPLETED = "nanochat.eval.completed"  # after every evaluation
REGRESSED = "nanochat.eval.regressed"  # after it, if the model got worse
MOST_ROWS = 60  # of the history on Prefect's page


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The results of an evaluation that completed."""

    outcome: Outcome
    evaluation: Built
    verdict: Assessment


def _name(parameters: dict[str, Any]) -> str:
    return history_name(parameters["model"])


@flow(name="nanochat-eval", flow_run_name=flow_run_name(_name), retries=0, persist_result=False)
@failing_in_a_line
@cancellable
@takes(EvalRequest)
def nanochat_eval(request: EvalRequest) -> Evaluated:
    """Evaluate a model and report a regression. A model that did not change is not run again."""
    rule, model = Rule(**shared(Rule, request)), request.model
    # No spare start for a plan: an evaluation saves no checkpoints, so its records show all
    # progress.
    setup = open_flow(request, will_plan=False)
    suite = setup.wait(
        lambda: open_suite(
            setup.store,
            model,
            profile=request.profile,
            overrides=request.overrides,
            warn=setup.warn,
        )
    )
    check_metric(suite, rule.metric)
    # Resolve upstream names of the stages that will be built only: pinned inputs have theirs.
    built = [stage for stage in suite.stages if stage.name not in suite.pinned]
    sections = {section for stage in built for section in stage.config}
    context, pins = setup.open_context(suite.opened, strict=request.strict, sections=sections)
    setup.wait(context.store.check_conditions)
    run = new_run(
        setup.run_id,
        history_name(model),
        request,
        upstream=pins,
        uses=(model,),
        profile=suite.profile,
        depth=suite.depth,
        overrides=suite.overrides,
    )
    run = setup.starts.record_in(run)
    return evaluate(
        model, suite.stages, context, run, rule, pinned=suite.pinned, retries=request.retries
    )


def evaluate(
    model: str,
    stages: Sequence[Stage],
    context: BuildContext,
    run: Run,
    rule: Rule,
    *,
    pinned: Mapping[str, Manifest],
    retries: int = RETRIES,
) -> Evaluated:
    """Build the last of the `stages`, which evaluates `model`, and apply the rule. In a flow only.

    Raises what `run_pipeline` raises, and ConfigError if the rule's metric was not measured.
    """
    outcome = run_pipeline(stages, context, run, pinned=pinned, retries=retries)
    stage = stages[-1].name
    built = outcome.stages[stage]
    wait = wait_of_run(context.store, context.stop, terms=context.terms)
    # The history includes this run, whose record was written as finished; `assess` skips it.
    history = wait(lambda: read_history(context.store, run.name, stage))
    newest = Evaluation(run=outcome.run, manifest=built.manifest)
    verdict = wait(lambda: assess(context.store, newest, history, rule))
    log = get_run_logger()
    (log.warning if verdict.regressed else log.info)(f"{model}: {verdict.text}")
    rows = history_rows(history[:MOST_ROWS], verdict.metric)
    about = f"Evaluations of {model}, latest first. Latest: {verdict.text}."
    with contextlib.closing(BackgroundWriter(run.name)) as pages:
        pages.show(stage, "table", rows, about=about)
    # Last, so that an automation that reads the run's page or record finds both complete.
    _emit_events(model, newest, built, verdict)
    return Evaluated(outcome=outcome, evaluation=built, verdict=verdict)


def _emit_events(model: str, newest: Evaluation, built: Built, verdict: Assessment) -> None:
    """Emit Prefect events of the evaluation: COMPLETED, and REGRESSED if the model got worse."""
    # Automations match on the labels of the resource alone, so what they need is a label too.
    resource = {
        "prefect.resource.id": f"nanochat.model.{key_of(model)}",
        "prefect.resource.name": model,
        "nanochat.model": model,
        "nanochat.fingerprint": newest.model,
        "nanochat.metric": verdict.metric,
        "nanochat.regressed": str(verdict.regressed).lower(),
        "nanochat.inside-interval": str(verdict.is_inside).lower(),
    }
    payload: dict[str, Any] = {
        "model": model,
        "fingerprint": newest.model,
        "run": newest.run.run,
        "evaluation": built.uri,
        **verdict.facts,
    }
    for event in (COMPLETED, *([REGRESSED] if verdict.regressed else [])):
        emit_event(event=event, resource=resource, payload=payload)
