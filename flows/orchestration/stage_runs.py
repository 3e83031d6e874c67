"""Stage requests as Prefect runs of the flow `one-stage`: find, create and cancel them.

Each has three tags. `request:` is the digest by which a run finds a request that it can share.
`stage:` and `run:`, what it builds and for which run, are for people; `run:` is also how a run
finds what it has to cancel.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from uuid import UUID

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
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.futures import PrefectFuture, wait
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelling

from flows.artifacts.runs import RunRecord
from flows.building.build import Built
from flows.building.context import BuildContext
from flows.building.stage_request import StageRequest, match_digest
from flows.orchestration.client import NOT_ANSWERING, quick_client, reporting_refusals
from infra.launch.torchrun import StageInterrupted
from infra.placement import ONE_STAGE, check_gpu_pool, unknown_pool
from infra.polling import MARGIN_SECONDS
from nanochat_core.errors import ConfigError, StoreError

LIVE = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
# A run that is being cancelled will not build: a caller that wants the stage requests it again,
# and the new builder waits for the lease of the old one.
_UNFINISHED = (StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING)
_STOPPED = (StateType.CANCELLING, StateType.CANCELLED)
# What the handlers of signals raise: Prefect's within a flow, and Python's.
_RAISED: dict[int, Callable[[], BaseException]] = {
    signal.SIGTERM: partial(TerminationSignal, signal=signal.SIGTERM),
    signal.SIGINT: KeyboardInterrupt,
}


def check_pool(pool: str) -> None:
    """Raise ConfigError unless GPU stages can be requested from the pool; works outside flows."""
    with reporting_refusals(), get_client(sync_client=True) as client:
        # A flow must not dispatch to its own pool: its worker would wait for itself.
        own = flow_run.get_id()
        check_gpu_pool(pool, own=client.read_flow_run(UUID(own)).work_pool_name if own else None)
        try:
            client.read_deployment_by_name(f"{ONE_STAGE}/{pool}")
        except ObjectNotFound:
            raise unknown_pool(pool) from None


def find_or_create(
    client: SyncPrefectClient, context: BuildContext, request: StageRequest
) -> FlowRun:
    """Return the flow run that builds the request: a live one, else a new one."""
    pool = context.placement.pool
    digest = match_digest(request, pool=pool)
    tags = [f"request:{digest}"]
    earlier = _find_runs(client, tags)
    if live := next((run for run in earlier if run.state_type in _UNFINISHED), None):
        text = f"following the existing run {live.name}, which is {state_name(live)}"
        context.watch(request.stage, {"kind": "message", "text": text})
        return live
    # Two callers that look at the same moment see the same last run, and so send the same
    # idempotency key: the server creates one run and returns it to both.
    after = str(earlier[0].id) if earlier else "first"
    return run_deployment(  # pyright: ignore[reportReturnType] - typed as a coroutine too
        f"{ONE_STAGE}/{pool}",
        parameters={"request": asdict(request)},
        flow_run_name=request.ref.name,
        tags=[*tags, f"stage:{request.ref.name}", f"run:{request.run}"],
        idempotency_key=f"{digest} after {after}",
        # The queue `train` has priority: training holds up later stages, evaluations seldom do.
        work_queue_name="eval" if "_eval" in request.stage else "train",
        timeout=0,  # return at once instead of waiting for the run's end
    )


def _find_runs(
    client: SyncPrefectClient, tags: Sequence[str], states: list[StateType] | None = None
) -> list[FlowRun]:
    """Return runs with all these tags, the newest first, by the server's clock."""
    state = FlowRunFilterState(type=FlowRunFilterStateType(any_=states)) if states else None
    found: list[FlowRun] = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=list(tags)), state=state),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=50,
    )
    # The expected start time of the query is set by the client's clock, which may be wrong.
    return sorted(
        found, key=lambda run: run.created.timestamp() if run.created else 0, reverse=True
    )


def state_name(run: FlowRun) -> str:
    """Return the name of the run's state as Prefect's pages show it."""
    return (run.state.name if run.state else None) or "unknown"


def is_cancelled(flow_run_id: str | None, *, before: bool = False) -> bool:
    """Return whether this flow run was cancelled; False if Prefect does not answer.

    With `before`, whether it was before its process began it: a supervisor or Prefect ends such a
    run, and Prefect still lets a process begin it that took longer to start.
    """
    if flow_run_id is not None:
        with contextlib.suppress(*NOT_ANSWERING, ConfigError), quick_client() as client:
            states = client.read_flow_run_states(UUID(flow_run_id))  # the oldest first
            return any(state.type in _STOPPED for state in states[::-1][before : before + 1])
    return False


@contextlib.contextmanager
def keeping_signals(stop: threading.Event) -> Generator[None]:
    """Set `stop` when SIGTERM or Ctrl-C arrives, and raise at the end what their handlers raise.

    Handlers raise wherever the main thread is, and code there may swallow that: the run would
    continue, and its process would be killed at the end of its grace. In another thread than the
    main one, which gets no signals, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # The interpreter writes each signal's number there as it arrives, also if the main thread is
    # blocked and its handler has to wait. The handlers stay: Prefect reports a cancelled run as
    # Crashed unless the handler of SIGTERM is its own.
    read, write = os.pipe()
    os.set_blocking(write, False)
    arrived: list[int] = []

    def note() -> None:
        while numbers := os.read(read, 64):
            if kept := [number for number in numbers if number in _RAISED]:
                arrived.extend(kept)
                stop.set()
        os.close(read)

    # A daemon: a handler may raise before the wakeup file is set, and nothing would end the thread.
    thread = threading.Thread(target=note, name="signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield
    finally:
        try:
            signal.set_wakeup_fd(before)
        finally:
            os.close(write)
            thread.join()
        if arrived:
            raise _RAISED[arrived[0]]()


def stop_stages(
    error: BaseException,
    context: BuildContext,
    futures: list[PrefectFuture[Built]],
    records: Mapping[str, RunRecord],
) -> bool:
    """Stop what still runs after `error`, and end the records; return whether it interrupted.

    `records` are those of the flow run, by the id of their run.
    """
    is_interrupted = isinstance(error, StageInterrupted) or not isinstance(error, Exception)
    # Before the cancel: no stage may be retried or requested again while remote runs end.
    context.stop.set()
    if context.placement.pool is not None and is_terminal(error):
        for run in records:
            cancel_requests_of(run)
    wait(futures, timeout=context.placement.resources.grace_seconds + MARGIN_SECONDS)
    with contextlib.suppress(StoreError):  # may be the error that is being raised
        for record in records.values():
            record.end("interrupted" if is_interrupted else "failed")
    if is_interrupted:
        wait(futures)  # without a limit: a checkpoint may be being uploaded
    return is_interrupted


def is_terminal(error: BaseException) -> bool:
    """Return whether the run failed or was cancelled.

    Not if only this process received SIGTERM: the run resumes elsewhere, and its remote stages
    continue meanwhile.
    """
    return isinstance(error, Exception | KeyboardInterrupt) or is_cancelled(flow_run.get_id())


def cancel_requests_of(run: str) -> None:
    """Cancel the remote stages of the run with this id; log it if that fails.

    They save first, while their lease keeps a later run waiting.
    """
    try:
        # The server cancels children of a cancelled run too, but only a while later.
        with quick_client() as client:
            found = _find_runs(client, [f"run:{run}"], LIVE)
            live = [each for each in found if any(tag.startswith("request:") for tag in each.tags)]
            for each in live:
                with contextlib.suppress(ObjectNotFound):  # deleted meanwhile
                    client.set_flow_run_state(each.id, Cancelling(message=f"{run} was stopped"))
    except (*NOT_ANSWERING, ConfigError) as error:
        get_run_logger().warning(f"stages on the pool's workers may still run: {error}")
