"""The Prefect flow `nanochat-eval`: evaluates a model again and reports a regression.

It is a run that uses the model, until the stage that evaluates it. However often it runs for the
same model and suite, the evaluation is one artifact, so a backlog of late runs ends as Cached. Each
run is recorded in the store as eval-{name}; the records are the history that a new evaluation is
compared with.
"""

import contextlib
from typing import Any

from prefect.events import emit_event
from prefect.logging import get_run_logger

from flows.building.build import Built
from flows.evals.regression import Assessment, Evaluation, assess, history_rows, read_history
from flows.evals.suite import EvalRequest, Suite, history_name, open_suite
from flows.leases.outage import StoreWait
from flows.orchestration.flow_setup import open_flow, planned_by_caller, warn
from flows.orchestration.forms import run_flow
from flows.orchestration.pipeline import Outcome, run
from flows.orchestration.stage_page import BackgroundWriter
from flows.render.text import key_of
from infra.storage.base import Store

COMPLETED = "nanochat.eval.completed"  # after every evaluation
REGRESSED = "nanochat.eval.regressed"  # after it, if the model got worse


@run_flow("nanochat-eval", EvalRequest, name_of=lambda request: history_name(request.model))
def nanochat_eval(request: EvalRequest) -> tuple[Built, Assessment]:
    """Evaluate a model and report a regression. A model that did not change is not run again."""
    known = planned_by_caller(request, Suite)
    setup = open_flow(store=request.store)
    suite = known or setup.wait(lambda: open_suite(request, setup.store, warn=warn))
    given = {suite.model.stage: suite.model} if suite.more else {}
    outcome = run(suite.run, setup=setup, uses=(request.model,), more=suite.more, given=given)
    return assess_run(suite.stage.name, outcome, suite.request, store=setup.store, wait=setup.wait)


def assess_run(
    stage: str, outcome: Outcome, request: EvalRequest, *, store: Store, wait: StoreWait
) -> tuple[Built, Assessment]:
    """Compare what `stage` measured with earlier evaluations of the model; show and report it.

    Returns what it measured too. Raises ConfigError if the requested metric was not measured.
    """
    model = request.model
    built = outcome.stages[stage]
    # The history includes this run, whose record was written as finished; `assess` skips it.
    history = wait(lambda: read_history(store, outcome.run.name, stage))
    newest = Evaluation(run=outcome.run, manifest=built.manifest)
    verdict = wait(lambda: assess(store, newest, history, request))
    log = get_run_logger()
    (log.warning if verdict.regressed else log.info)(f"{model}: {verdict.text}")
    rows = history_rows(history, verdict.metric)
    about = f"Evaluations of {model}, latest first. Latest: {verdict.text}."
    with contextlib.closing(BackgroundWriter(outcome.run.name)) as pages:
        pages.show(stage, "table", rows, about=about)
    # Last, so that an automation that reads the run's page or record finds both complete.
    _emit_events(model, newest, built, verdict)
    return built, verdict


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
