"""A GPU stage built by the workers of a pool: ordered, followed, and stopped when the run is.

The order is a run of the deployment one-stage/<pool>, one for each node. A caller looks for a live
run of the same order first and follows that one, so a caller that died and was started again finds
what it ordered, and two callers share one. Whether the stage is built is asked of the store alone,
never of a run's state; whether the run is alive, of Prefect alone: one without heartbeats is set to
Crashed by an automation. A caller sets no order's state, except to cancel its own.
"""

import contextlib
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound

from flows.artifacts.publish import find_manifest
from flows.artifacts.runs import Run
from flows.build.build import BuildContext, Built, look_up, reuse, uri_of
from flows.build.retry import TransientStageError
from flows.build.stage_request import StageRequest, make_request
from flows.identity.manifest import Manifest
from flows.leases.lease import find_holder
from flows.orchestration.client import NOT_ANSWERING, quick_client, telling_refusals
from flows.orchestration.stage_runs import LIVE, check_pool, find_or_create, state_name
from flows.stages import Stage
from infra.launch.torchrun import StageInterrupted
from nanochat_core.errors import ArtifactError, NanochatError, StageError, StoreError

SECONDS_BETWEEN_LOOKS = 2.0  # at the runs, which costs a request each
SECONDS_BETWEEN_TELLING = 5.0
PATIENCE = 3600.0  # seconds without an answer of Prefect; the stage is built meanwhile
HINT = "\nhint: "  # between the two lines of a failed run's message


def dispatch(
    stage: Stage, site: BuildContext, run: Run, inputs: Mapping[str, Manifest], *, force: bool
) -> Built:
    """The artifact of `stage` made from `inputs`, ordered of the pool unless the store has it.

    Raises TransientStageError when whoever was to build it is gone, StageError with the far side's
    own words and hint when it failed or was cancelled, StageInterrupted when this run is stopped.
    In that last case the other side goes on: see `cancel_stage_runs`.
    """
    try:
        with _alone(site, stage):
            return _dispatch(stage, site, run, inputs, force=force)
    except StageInterrupted:
        site.watch(stage.name, {"kind": "interrupted"})
        raise
    except NanochatError as error:
        event = {"kind": "failed", "error": str(error), "hint": error.hint, "log_tail": ""}
        site.watch(stage.name, event)
        raise


def _dispatch(
    stage: Stage, site: BuildContext, run: Run, inputs: Mapping[str, Manifest], *, force: bool
) -> Built:
    began = time.time()
    sought = look_up(stage, site, inputs, force=force)
    if sought.manifest is not None:
        return reuse(site, sought.manifest)
    order = make_request(
        stage, site, run, inputs, fingerprint=sought.identity.fingerprint, force=force
    )
    while True:
        told = _ProgressRelay(site, order)
        ended = _follow(site, order, _open_runs(site, order, told), told)
        manifest = look_up(stage, site, inputs, force=force).manifest
        if manifest is not None:
            return _finished(site, manifest, seconds=time.time() - began)
        _check_ended(order, ended)


def _finished(site: BuildContext, manifest: Manifest, *, seconds: float) -> Built:
    uri = uri_of(site.store, manifest)
    event = {
        "kind": "finished",
        "uri": uri,
        "seconds": seconds,
        "metrics": manifest.provenance.metrics,
    }
    site.watch(manifest.stage, event)
    return Built(manifest=manifest, uri=uri, cached=False)


@contextlib.contextmanager
def _alone(site: BuildContext, stage: Stage) -> Generator[None]:
    """Of a run's stages that take several nodes, one at a time: two would wait for each other."""
    if site.placement.nodes == 1:
        yield
        return
    while not site.device.acquire(timeout=0.2):
        _check_not_stopped(site, stage.name)
    try:
        yield
    finally:
        site.device.release()


def _check_not_stopped(site: BuildContext, stage: str) -> None:
    if site.stop.is_set():
        raise StageInterrupted(f"{stage} was interrupted: the run is being stopped")


# The far side's runs.


@dataclass(frozen=True, kw_only=True)
class _Ended:
    """A run that is over, or None for one that was deleted, though the artifact is not there."""

    name: str
    run: FlowRun | None


def _open_runs(site: BuildContext, order: StageRequest, told: "_ProgressRelay") -> list[FlowRun]:
    """A run for each node: the live one, else a new one."""
    patience = _OutageTimer(site, order, told)
    while True:
        try:
            with quick_client() as client:
                return [find_or_create(client, site, order, node) for node in range(order.nodes)]
        except ObjectNotFound:
            check_pool(site.placement.pool or "")
            raise
        except NOT_ANSWERING as error:
            patience.spend(error)


def _follow(
    site: BuildContext, order: StageRequest, runs: list[FlowRun], told: "_ProgressRelay"
) -> list[_Ended]:
    """Wait until the first node's run is over, or another one's that did not end well.

    While Prefect does not answer, the artifact is looked for in the store.
    """
    patience = _OutageTimer(site, order, told)
    with quick_client() as client:
        while True:
            try:
                with telling_refusals():
                    runs, ended = _look(client, runs)
                    told.tell(runs)
            except NOT_ANSWERING as error:
                if _is_there(site, order):
                    return []
                patience.spend(error)
                continue
            patience.renew()
            if any(_ends_all(item, first=runs[0].id) for item in ended):
                return ended
            site.stop.wait(SECONDS_BETWEEN_LOOKS)
            _check_not_stopped(site, order.stage)


def _look(client: SyncPrefectClient, runs: Sequence[FlowRun]) -> tuple[list[FlowRun], list[_Ended]]:
    """The runs as they are now, and those that are over."""
    found: list[FlowRun] = []
    ended: list[_Ended] = []
    for run in runs:
        try:
            run = client.read_flow_run(run.id)
        except ObjectNotFound:
            ended.append(_Ended(name=run.name, run=None))
        else:
            if run.state is not None and run.state.is_final():
                ended.append(_Ended(name=run.name, run=run))
        found.append(run)
    return found, ended


def _ends_all(ended: _Ended, *, first: UUID) -> bool:
    run = ended.run
    return run is None or run.id == first or run.state_type != StateType.COMPLETED


def _is_there(site: BuildContext, order: StageRequest) -> bool:
    """Whether there is some artifact; `seek` says whether it is the wanted one."""
    with contextlib.suppress(StoreError):
        found = find_manifest(site.store, order.stage, order.fingerprint)
        return found is not None and (not order.force or found.provenance.run == order.run)
    return False


def _check_ended(order: StageRequest, ended: Sequence[_Ended]) -> None:
    """Say why there is no artifact; nothing when the runs were another caller's."""
    for item in ended:
        run = item.run
        if run is None:
            raise TransientStageError(f"{order.name} was lost: its run {item.name} was deleted")
        if f"run:{order.run}" not in run.tags:
            continue
        said = (run.state.message if run.state else None) or "it says nothing of why"
        if run.state_type == StateType.FAILED:
            message, _, hint = said.partition(HINT)
            raise StageError(message, hint=hint or None)
        if run.state_type == StateType.CANCELLED:
            raise StageError(
                f"{order.name} was cancelled: {said}",
                hint="run the same command again, or press Retry: it goes on from there",
            )
        if run.state_type == StateType.CRASHED:
            message, _, hint = said.partition(HINT)
            raise TransientStageError(f"{order.name} was lost: {message}", hint=hint or None)
        if run.state_type == StateType.COMPLETED:
            raise TransientStageError(
                f"{order.name} is not in the store, though its run {run.name} completed",
                hint="worker and caller must use the same store",
            )


class _OutageTimer:
    """How long Prefect may be away."""

    def __init__(self, site: BuildContext, order: StageRequest, told: "_ProgressRelay") -> None:
        self._site = site
        self._order = order
        self._told = told
        self._answered = time.monotonic()

    def renew(self) -> None:
        """Prefect has answered."""
        self._answered = time.monotonic()

    def spend(self, error: Exception) -> None:
        """Wait until the next try. Raises TransientStageError after an hour, StageInterrupted."""
        self._told.say(f"Prefect does not answer ({_first_line(error)}); it is asked again")
        if time.monotonic() - self._answered > PATIENCE:
            raise TransientStageError(
                f"{self._order.name}: Prefect did not answer for an hour",
                hint="see that its server runs: `nanochat up`",
            ) from error
        self._site.stop.wait(SECONDS_BETWEEN_LOOKS)
        _check_not_stopped(self._site, self._order.stage)


class _ProgressRelay:
    """Tells of the runs' states and of the job's progress, now and again."""

    def __init__(self, site: BuildContext, order: StageRequest) -> None:
        self._site = site
        self._order = order
        self._said = ""
        self._next = 0.0
        self._step = -1

    def say(self, text: str) -> None:
        """Tell it, unless it was the last thing told."""
        if text != self._said:
            self._said = text
            self._site.watch(self._order.stage, {"kind": "waiting", "text": text})

    def tell(self, runs: Sequence[FlowRun]) -> None:
        """States when they change, progress every few seconds."""
        states = sorted({state_name(run) for run in runs if run.state_type in LIVE})
        if states:
            wait = "; no worker has taken it" if "Late" in states else ""
            where = f"ordered as {self._order.name} of pool {self._site.placement.pool}"
            self.say(f"{where}: {', '.join(states)}{wait}")
        if "Running" in states and time.monotonic() >= self._next:
            self._next = time.monotonic() + SECONDS_BETWEEN_TELLING
            with contextlib.suppress(StoreError, ArtifactError):
                self._tell_progress()

    def _tell_progress(self) -> None:
        """What the builder's last renewal of its lease says."""
        order = self._order
        holder = find_holder(self._site.store, order.stage, order.fingerprint)
        if holder is None or not holder.record.total or holder.record.step == self._step:
            return
        step, total = holder.record.step, holder.record.total
        event: dict[str, Any] = {"time": time.time(), "step": step, "total": total}
        if self._step < 0:
            start = {"kind": "start", **event, "unit": "step", "resumed": False}
            self._site.watch(order.stage, start)
        self._step = step
        self._site.watch(order.stage, {"kind": "step", **event, "values": {}})


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
