"""Dispatch of GPU stages to the workers of a pool: submit a request, follow it, cancel it.

A request is one run of the deployment one-stage/<pool>. A caller first looks for a
live run of the same request and follows that one: a caller that died and was restarted finds its
own, and two callers share one. Only the store decides whether the stage is built, never the state
of a run. Only the heartbeats decide whether a run is alive: a supervisor sets one without them
to Crashed. A caller sets the state of no request, except to cancel its own.
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound

from flows.artifacts.runs import Run
from flows.building.build import (
    BuildContext,
    Built,
    finish,
    look_up,
    reporting_failure,
    reuse,
)
from flows.building.retry import PATIENCE, TransientStageError
from flows.building.stage_request import StageRequest, make_request
from flows.identity.manifest import Manifest
from flows.leases.lease import find_holder
from flows.leases.outage import WaitLog
from flows.orchestration.client import NOT_ANSWERING, quick_client, reporting_refusals
from flows.orchestration.stage_runs import LIVE, find_or_create, state_name
from flows.stages import Stage
from infra.placement import unknown_pool
from infra.polling import ASK_SECONDS, SLOW_SECONDS
from infra.retry import NoAnswer, until_answered
from nanochat_core.errors import ArtifactError, StageError, StoreError, first_line

T = TypeVar("T")
HINT = "\nhint: "  # separates the error from its hint in the state message of a failed run


def dispatch(
    stage: Stage, context: BuildContext, run: Run, inputs: Mapping[str, Manifest], *, force: bool
) -> Built:
    """Return the artifact of `stage` made from `inputs`; the pool builds it unless it is stored.

    Raises TransientStageError if the builder is gone, StageError with the builder's message and
    hint if it failed or was cancelled, StageInterrupted if this run is stopped. In the last case
    the builder continues: see `cancel_requests_of`.
    """
    began = time.time()
    # The builder's own events stay on its machine, so the failure is reported here once more.
    with reporting_failure(stage, context):
        lookup = look_up(stage, context, inputs, force=force)
        if lookup.manifest is not None:
            return reuse(context, lookup.manifest)
        request = make_request(stage, context, run, inputs, identity=lookup.identity)
        # Repeats only where the run that ended was another caller's, cancelled or failed for
        # reasons of its own: then this caller submits a request itself. See _check_ended.
        while True:
            relay = _ProgressRelay(context, request)
            ended = _follow(context, request, _open_run(context, request, relay), relay)
            # First the store, whatever the run's state: it may crash after it has published. By
            # the number that was requested: another run may have asked for the next one meanwhile.
            redo = lookup.identity.redo
            manifest = look_up(stage, context, inputs, force=False, redo=redo).manifest
            if manifest is not None:
                return finish(context, manifest, began=began)
            _check_ended(request, ended)


def _open_run(context: BuildContext, request: StageRequest, relay: "_ProgressRelay") -> FlowRun:
    """Return the flow run that builds the request. Retries while Prefect does not answer."""

    def ask() -> FlowRun:
        with quick_client() as client:
            return find_or_create(client, context, request)

    try:
        return relay.ask(ask)
    except ObjectNotFound:
        # The deployment has gone since the flow began.
        raise unknown_pool(context.placement.pool or "") from None


def _follow(
    context: BuildContext, request: StageRequest, run: FlowRun, relay: "_ProgressRelay"
) -> FlowRun:
    """Wait for the run's end and return it. Raises TransientStageError if the run was deleted."""
    with quick_client() as client:

        def ask() -> FlowRun:
            with reporting_refusals():
                return client.read_flow_run(run.id)

        try:
            while True:
                found = relay.ask(ask)
                relay.report(found)
                if found.state is not None and found.state.is_final():
                    return found
                context.pause(request.stage, ASK_SECONDS)
        except ObjectNotFound:
            text = f"{request.ref.name} was lost: its run {run.name} was deleted"
            raise TransientStageError(text) from None


def _check_ended(request: StageRequest, run: FlowRun) -> None:
    """Raise the reason why there is no artifact; do nothing if the run was another caller's."""
    # A shared request of another caller may end because that caller was cancelled.
    if f"run:{request.run}" not in run.tags:
        return
    reason = (run.state.message if run.state else None) or "no reason was given"
    (message, _, hint), name = reason.partition(HINT), request.ref.name
    match run.state_type:
        case StateType.FAILED:
            raise StageError(message, hint=hint or None)
        case StateType.CANCELLED:
            raise StageError(
                f"{name} was cancelled: {reason}",
                hint="run the same command again, or press Retry, to resume",
            )
        case StateType.CRASHED:
            raise TransientStageError(f"{name} was lost: {message}", hint=hint or None)
        case _:
            raise TransientStageError(
                f"{name} is not in the store, though its run {run.name} completed",
                hint="worker and caller must use the same store",
            )


class _ProgressRelay:
    """Events about the flow run's states and the remote job's progress, without repetitions."""

    def __init__(self, context: BuildContext, request: StageRequest) -> None:
        self._context = context
        self._request = request
        self._waiting = WaitLog(context.log(request.stage, "waiting"), every=math.inf)
        self._next = 0.0
        self._step = -1

    def ask(self, request: Callable[[], T]) -> T:
        """Return what `request` returns; repeat it while Prefect does not respond.

        Raises TransientStageError after PATIENCE, StageInterrupted if the run is being stopped.
        """

        def report(failure: NoAnswer) -> None:
            if isinstance(failure.error, ObjectNotFound):
                raise failure.error
            text = f"Prefect does not answer ({first_line(failure.error)}); retrying"
            self._waiting.report(text, text)
            if failure.seconds > PATIENCE:
                raise TransientStageError(
                    f"{self._request.ref.name}: Prefect did not answer for an hour",
                    hint="start or check its server: `nanochat up`",
                ) from failure.error

        return until_answered(
            request,
            NOT_ANSWERING,
            on_failure=report,
            wait=partial(self._context.pause, self._request.stage),
        )

    def report(self, run: FlowRun) -> None:
        """Report the run's state when it changes, and progress every few seconds."""
        state = state_name(run)
        if run.state_type in LIVE:
            wait = "; no worker has taken it" if state == "Late" else ""
            where = f"requested as {self._request.ref.name} of pool {self._context.placement.pool}"
            text = f"{where}: {state}{wait}"
            self._waiting.report(text, text)
        if state == "Running" and time.monotonic() >= self._next:
            self._next = time.monotonic() + SLOW_SECONDS
            with contextlib.suppress(StoreError, ArtifactError):
                self._log_progress()

    def _log_progress(self) -> None:
        """Report the step that the builder wrote into its lease at the last renewal."""
        request = self._request
        holder = find_holder(self._context.store, request.ref)
        if holder is None or not holder.record.total or holder.record.step == self._step:
            return
        step, total = holder.record.step, holder.record.total
        event: dict[str, Any] = {"time": time.time(), "step": step, "total": total}
        # Displays begin their progress bar with a `start` event, which stays on the worker.
        if self._step < 0:
            start = {"kind": "start", **event, "unit": "step", "resumed": False}
            self._context.watch(request.stage, start)
        self._step = step
        self._context.watch(request.stage, {"kind": "step", **event, "values": {}})
