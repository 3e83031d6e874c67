"""A GPU stage built by the workers of a pool: ordered, followed, and stopped when the run is.

The order is a run of the deployment one-stage/<pool>, one for each node. Whoever wants a stage
looks for a live run of it first and goes on with that one, so a caller that died and was started
again finds what it ordered, and two callers share one. Whether the stage is built is asked of the
store alone, never of a run's state.
"""

import contextlib
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.states import Cancelling

from flows.artifacts import find_manifest
from flows.build import Built, Site, reuse, seek, uri_of
from flows.lease import find_holder
from flows.lost import StageLost
from flows.manifest import Manifest
from flows.order import Order, make_order
from flows.runs import Run
from flows.stages import Stage
from infra.launch.torchrun import SECONDS_TO_STOP, StageInterrupted
from infra.storage.base import Store
from nanochat_core.errors import ConfigError, NanochatError, StageError, StoreError

FLOW = "one-stage"  # of flows/one_stage.py
SECONDS_BETWEEN_LOOKS = 2.0  # at the runs, which costs a request each
SECONDS_BETWEEN_TELLING = 5.0
PATIENCE = 3600.0  # seconds without an answer of Prefect; the stage is built meanwhile
HINT = "\nhint: "  # between the two lines of a failed run's message
NOT_ANSWERING = (httpx.HTTPError, PrefectException, OSError)
_LIVE = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
_STOPPED = (StateType.CANCELLING, StateType.CANCELLED)


def check_pool(pool: str) -> None:
    """Raises ConfigError unless stages can be ordered of the pool."""
    with get_client(sync_client=True) as client:
        try:
            client.read_deployment_by_name(f"{FLOW}/{pool}")
        except ObjectNotFound:
            raise ConfigError(
                f"no stage can be ordered of the pool '{pool}': there is no deployment "
                f"{FLOW}/{pool}",
                hint="`nanochat up` makes those of the pools cpu and gpu",
            ) from None


def dispatch(
    stage: Stage, site: Site, run: Run, inputs: Mapping[str, Manifest], *, force: bool
) -> Built:
    """The artifact of `stage` made from `inputs`, ordered of the pool unless the store has it.

    Raises StageLost when whoever was to build it is gone, StageError with the far side's own words
    and hint when it failed or was cancelled, StageInterrupted when this run is stopped. In that
    last case the other side goes on: see `cancel_orders`.
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
    stage: Stage, site: Site, run: Run, inputs: Mapping[str, Manifest], *, force: bool
) -> Built:
    began = time.time()
    sought = seek(stage, site, inputs, force=force)
    if sought.manifest is not None:
        return reuse(site, sought.manifest)
    order = make_order(
        stage, site, run, inputs, fingerprint=sought.identity.fingerprint, force=force
    )
    while True:
        ended = _follow(site, order, _open_runs(site, order))
        manifest = seek(stage, site, inputs, force=force).manifest
        if manifest is not None:
            return _finished(site, manifest, seconds=time.time() - began)
        _check_ended(order, ended)


def _finished(site: Site, manifest: Manifest, *, seconds: float) -> Built:
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
def _alone(site: Site, stage: Stage) -> Generator[None]:
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


def _check_not_stopped(site: Site, stage: str) -> None:
    if site.stop.is_set():
        raise StageInterrupted(f"{stage} was interrupted: the run is being stopped")


# The far side's runs.


@dataclass(frozen=True, kw_only=True)
class _Ended:
    """A run that is over, or None for one that was deleted, though the artifact is not there."""

    name: str
    run: FlowRun | None


def _open_runs(site: Site, order: Order) -> list[FlowRun]:
    """A run for each node: the live one, else a new one. Raises StageLost without Prefect."""
    try:
        with get_client(sync_client=True) as client:
            return [_open_run(client, site, order, node) for node in range(order.nodes)]
    except ObjectNotFound:
        check_pool(site.placement.pool or "")
        raise
    except NOT_ANSWERING as error:
        raise StageLost(
            f"{order.name} could not be ordered: Prefect does not answer ({_first_line(error)})",
            hint="see that its server runs: `nanochat up`",
        ) from error


def _open_run(client: SyncPrefectClient, site: Site, order: Order, node: int) -> FlowRun:
    tags = [f"stage:{order.name}", f"node:{node}"]
    if live := _find_runs(client, tags, _LIVE):
        text = f"goes on with run {live[0].name}, which is {_state_name(live[0])}"
        site.watch(order.stage, {"kind": "message", "text": text})
        return live[0]
    # Two who look at the same moment see the same last run, and so ask for one and the same.
    last = _find_runs(client, tags, None)
    after = str(last[0].id) if last else "first"
    return run_deployment(  # pyright: ignore[reportReturnType] - typed as a coroutine too
        f"{FLOW}/{site.placement.pool}",
        parameters={**asdict(order), "node": node},
        flow_run_name=order.name if order.nodes == 1 else f"{order.name} node {node}",
        tags=[*tags, f"run:{order.run}"],
        idempotency_key=f"{order.name}/{node} after {after}",
        work_queue_name="eval" if "_eval" in order.stage else "train",
        timeout=0,
    )


def _find_runs(
    client: SyncPrefectClient, tags: Sequence[str], states: list[StateType] | None
) -> list[FlowRun]:
    """Runs with all these tags, the newest first."""
    state = FlowRunFilterState(type=FlowRunFilterStateType(any_=states)) if states else None
    found: list[FlowRun] = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=list(tags)), state=state),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=50,
    )
    return found


def _follow(site: Site, order: Order, runs: list[FlowRun]) -> list[_Ended]:
    """Wait until the first node's run is over, or another one's that did not end well.

    While Prefect does not answer, the artifact is looked for in the store.
    """
    told = _Told(site, order)
    answered = time.monotonic()
    while True:
        try:
            runs, ended = _look(runs)
            answered = time.monotonic()
            told.tell(runs)
        except NOT_ANSWERING as error:
            ended = list[_Ended]()
            if _is_there(site, order):
                return ended
            told.say(f"Prefect does not answer ({_first_line(error)}); the stage goes on meanwhile")
            if time.monotonic() - answered > PATIENCE:
                raise StageLost(f"{order.name}: Prefect did not answer for an hour") from error
        if any(_ends_all(item, first=runs[0].id) for item in ended):
            return ended
        site.stop.wait(SECONDS_BETWEEN_LOOKS)
        _check_not_stopped(site, order.stage)


def _look(runs: list[FlowRun]) -> tuple[list[FlowRun], list[_Ended]]:
    """The runs as they are now, and those that are over."""
    found: list[FlowRun] = []
    ended: list[_Ended] = []
    with get_client(sync_client=True) as client:
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


def _is_there(site: Site, order: Order) -> bool:
    """Whether there is some artifact; `seek` says whether it is the wanted one."""
    with contextlib.suppress(StoreError):
        found = find_manifest(site.store, order.stage, order.fingerprint)
        return found is not None and (not order.force or found.provenance.run == order.run)
    return False


def _check_ended(order: Order, ended: Sequence[_Ended]) -> None:
    """Say why there is no artifact; nothing when the runs were another caller's."""
    for item in ended:
        run = item.run
        if run is None:
            raise StageLost(f"{order.name} was lost: its run {item.name} was deleted")
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
            raise StageLost(f"{order.name} was lost: {message}", hint=hint or None)
        if run.state_type == StateType.COMPLETED:
            raise StageLost(
                f"{order.name} is not in the store, though its run {run.name} completed",
                hint="worker and caller must use the same store",
            )


class _Told:
    """Tells of the runs' states and of the job's progress, now and again."""

    def __init__(self, site: Site, order: Order) -> None:
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
        states = sorted({_state_name(run) for run in runs if run.state_type in _LIVE})
        if states:
            wait = "; no worker has taken it" if "Late" in states else ""
            where = f"ordered as {self._order.name} of pool {self._site.placement.pool}"
            self.say(f"{where}: {', '.join(states)}{wait}")
        if "Running" in states and time.monotonic() >= self._next:
            self._next = time.monotonic() + SECONDS_BETWEEN_TELLING
            with contextlib.suppress(StoreError):
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


def _state_name(run: FlowRun) -> str:
    return (run.state.name if run.state else None) or "unknown"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


# Stopping.


def is_cancelled(flow_run_id: str | None) -> bool:
    """Whether somebody has cancelled this flow run, as far as Prefect answers."""
    if flow_run_id is not None:
        with contextlib.suppress(*NOT_ANSWERING), get_client(sync_client=True) as client:
            return client.read_flow_run(UUID(flow_run_id)).state_type in _STOPPED
    return False


def cancel_orders(run_id: str) -> list[FlowRun]:
    """Cancel what the run has ordered, and return it. The far side saves first: see `wait_saved`.

    The server would do it too for runs of a cancelled one, a while later. Raises what Prefect's
    client raises when it does not answer.
    """
    with get_client(sync_client=True) as client:
        live = [run for run in _find_runs(client, [f"run:{run_id}"], _LIVE) if _is_order(run)]
        for run in live:
            client.set_flow_run_state(run.id, Cancelling(message=f"{run_id} was stopped"))
    return live


def wait_saved(
    store: Store, orders: Sequence[FlowRun], *, seconds: float = SECONDS_TO_STOP
) -> None:
    """Wait until cancelled orders have ended: whoever built them has given the lease back.

    Their state follows later: the worker says Cancelled when it has seen all processes end.
    """
    deadline = time.monotonic() + seconds
    names = [(run.parameters["stage"], run.parameters["fingerprint"]) for run in orders]
    with contextlib.suppress(StoreError):
        while any(find_holder(store, *name) for name in names) and time.monotonic() < deadline:
            time.sleep(0.5)


def _is_order(run: FlowRun) -> bool:
    return any(tag.startswith("node:") for tag in run.tags)
