"""What every flow of whole runs begins with: its name, store and build context."""

import contextlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

from prefect.logging import get_run_logger
from prefect.runtime import deployment, flow_run
from prefect.settings import PREFECT_UI_URL

from flows.artifacts.runs import Run, find_run
from flows.building.build import BuildContext
from flows.leases import run_lock
from flows.leases.held_lease import LeaseTimings
from flows.leases.outage import StoreWait, WaitLog
from flows.orchestration.caller import LOCAL_RUN, LocalRun
from flows.orchestration.client import NOT_ANSWERING, quick_client
from flows.orchestration.stage_runs import check_pool
from flows.plan.plan import StagePlan
from flows.plan.upstream import Log
from infra.placement import Placement, default_home, default_store
from infra.prefect.flow_runs import RESUMES, page_of
from infra.storage.base import Store
from infra.storage.open import open_store
from nanochat_core.config import RunConfig
from nanochat_core.errors import ArtifactError, ConfigError

Known = TypeVar("Known", bound=Any)

_BUILT, _STEPS = "nanochat.built", "nanochat.steps"  # labels of a flow run: what it reached


@dataclass(frozen=True, kw_only=True)
class FlowSetup:
    """The current flow run, opened: see `open_flow`."""

    run_id: str  # the flow run's name
    store: Store
    wait: StoreWait  # for the flow's own requests to the store
    caller: LocalRun  # the command, or the worker's process

    def find_earlier(self, run: str) -> Run | None:
        """Return the record that an earlier start of the run with this id has written, if any."""
        return self.wait(lambda: find_record(self.store, run, log=warn))

    def open_context(self, run: RunConfig, placement: Placement, *, strict: bool) -> BuildContext:
        """Return the context to build a configuration in.

        Raises ConfigError if the pool takes no stages, or if several nodes have no pool.
        """
        if placement.pool is not None:
            check_pool(placement.pool)
        elif placement.nodes != 1:
            raise ConfigError(
                f"nodes is {placement.nodes}, but a run without a pool uses this machine only",
                hint="name the work pool whose workers run on the machines, such as gpu",
            )
        placement.home.mkdir(parents=True, exist_ok=True)
        return BuildContext(
            run=run,
            run_id=self.run_id,
            placement=placement,
            store=self.store,
            watch=self.caller.watch,
            strict=strict,
            stop=self.caller.stop,
        )


def warn(text: str) -> None:
    """Log a line of the current flow run as a warning."""
    get_run_logger().warning(text)


def planned_by_caller(request: object, kind: type[Known]) -> Known | None:
    """Return what the command of the current flow has planned of this very request, else None."""
    caller = LOCAL_RUN.get()
    known = caller.planned if caller else None
    return known if isinstance(known, kind) and known.request == request else None


def open_flow(*, store: str | None, runs: Iterable[str] = ()) -> FlowSetup:
    """Open the store of the current flow run.

    Args:
        store: URL of the store; None: that of this machine.
        runs: Ids of the runs that the flow run records, if it has not one run of its own id.
    """
    command = LOCAL_RUN.get()
    # The events of a deployed run are shown by Prefect alone.
    caller = command or LocalRun(home=default_home(), watch=lambda stage, event: None)
    if caller.planned:
        opened = caller.planned.store
    else:
        opened = open_store(store or default_store(caller.home))
    run_id = flow_run.get_name()
    assert run_id is not None  # this is called in flows only
    if command:
        for run in (run_id, *runs):
            lock = run_lock.hold(caller.home, run, store=opened.url, unreported=caller.unreported)
            caller.locks.enter_context(lock)
        if (root := PREFECT_UI_URL.value()) and (own := flow_run.get_id()):
            page = page_of(root, own)
            text = f"in Prefect: {page} (the server keeps running; `nanochat down` stops it)"
            caller.watch("run", {"kind": "message", "text": text})
    wait = wait_of_run(opened, caller.stop, LeaseTimings())
    return FlowSetup(run_id=run_id, store=opened, wait=wait, caller=caller)


def note_progress(items: Iterable[StagePlan]) -> None:
    """Begin the count of the current flow run's resumes again if its plan got further than before.

    Progress is an artifact that was built since, or a later checkpoint to resume from. It is noted
    as labels of the flow run on Prefect's server; one that does not answer ends no run.
    """
    if (own := flow_run.get_id()) is None or deployment.get_id() is None:
        return
    items = list(items)
    built = sum(item.state == "=" for item in items)
    reached = built, sum(item.resume.step for item in items if item.resume and item.state != "=")
    with contextlib.suppress(*NOT_ANSWERING, ConfigError), quick_client() as client:
        labels = client.read_flow_run(UUID(own)).labels
        known = labels.get(_BUILT, -1), labels.get(_STEPS, 0)
        if reached > known:
            client.update_flow_run_labels(
                UUID(own), {_BUILT: reached[0], _STEPS: reached[1], RESUMES: 0}
            )


def find_record(store: Store, run: str, *, log: Log) -> Run | None:
    """Return the record of a run. A damaged one is reported and counts as none."""
    try:
        return find_run(store, run)
    except ArtifactError as error:
        log(f"{error}; names upstream are resolved again")
        return None


def wait_of_run(store: Store, stop: threading.Event, terms: LeaseTimings) -> StoreWait:
    """Return a retry policy for the run's own store requests that waits without a limit."""
    waiting = WaitLog(get_run_logger().warning, every=terms.report)
    return StoreWait(store=store, name="the run", waiting=waiting, stop=stop, terms=terms)
