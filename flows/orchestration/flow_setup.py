"""What every flow of whole runs begins with: its name, store and build context."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from prefect import Flow, flow
from prefect.logging import get_run_logger
from prefect.runtime import deployment, flow_run
from prefect.settings import PREFECT_UI_URL

from flows.artifacts.runs import Run, find_run, new_run_id, timestamp
from flows.building.build import BuildContext
from flows.identity.ref import name_in
from flows.leases import run_lock
from flows.leases.held_lease import LeaseTimings
from flows.leases.outage import StoreWait, WaitLog
from flows.orchestration.caller import LOCAL_RUN, LocalRun, end_when_cancelled
from flows.orchestration.client import NOT_ANSWERING, quick_client
from flows.orchestration.forms import takes
from flows.orchestration.stage_runs import check_pool
from flows.orchestration.stage_task import failed
from flows.plan.plan import StagePlan
from flows.plan.planned import Opened, Planned, plan_run
from flows.plan.upstream import Log, Pins
from flows.run_request import RunRequest, request_of
from infra.placement import Placement, default_home, default_store
from infra.prefect.flow_runs import RESUMES, page_of
from infra.prefect.supervisor.workers import end_with_worker
from infra.storage.base import Store
from infra.storage.open import open_store
from nanochat_core.config import RunConfig
from nanochat_core.errors import ArtifactError, ConfigError, NanochatError

R = TypeVar("R")
Request = TypeVar("Request")
Known = TypeVar("Known", bound=Opened)

_BUILT, _STEPS = "nanochat.built", "nanochat.steps"  # labels of a flow run: what it reached


def _flow_run_name(name_of: Callable[[dict[str, Any]], str]) -> Callable[[], str]:
    """Return a function for Prefect that names a flow run by the id of its run.

    The id is new, and of the name that `name_of` returns for the flow's parameters.
    """

    def name() -> str:
        given = flow_run.get_name() or ""
        # A retry keeps its name. The count is of attempts before this one: it counts itself once
        # it is running.
        if flow_run.get_run_count():
            return given
        parameters = flow_run.get_parameters()
        try:
            found = name_of(parameters)
        except ConfigError:
            # The flow raises it again and so fails; raised here it would crash without a hint.
            found = parameters.get("run_name") or parameters.get("profile") or "refused"
        # `nanochat run --submit` has given it an id already, by which its user finds it.
        return given if name_in(given) == found else new_run_id(found, timestamp(time.time()))

    return name


def run_flow(
    name: str, kind: type[Request], *, name_of: Callable[[Request], str]
) -> Callable[[Callable[[Request], R]], Flow[..., R]]:
    """Make a function of one request the Prefect flow `name` of the request's fields.

    `name_of` returns the name of the run. Cancel ends it as Cancelled, and a NanochatError fails it
    with its line and hint alone.
    """

    def wrap(function: Callable[[Request], R]) -> Flow[..., R]:
        @functools.wraps(function)
        def body(request: Request) -> R:
            end_with_worker()
            try:
                return end_when_cancelled(functools.partial(function, request))
            except NanochatError as error:
                state: Any = failed(error)  # Prefect makes a returned state the run's own
                return state

        return flow(
            name=name,
            flow_run_name=_flow_run_name(lambda given: name_of(request_of(kind, given))),
            retries=0,
            persist_result=False,
        )(takes(kind)(body))

    return wrap


@dataclass(frozen=True, kw_only=True)
class FlowSetup:
    """The current flow run, opened: see `open_flow`."""

    run_id: str  # the flow run's name
    home: Path
    store: Store
    wait: StoreWait  # for the flow's own requests to the store
    caller: LocalRun | None  # None: a worker runs the flow
    stop: threading.Event

    @property
    def warn(self) -> Log:
        """Logs a line as a warning."""
        return get_run_logger().warning

    def plan(self, request: RunRequest) -> Planned:
        """Return the plan of the requested run: the command's own, else a new one.

        Raises what `plan_run` raises.
        """
        if (known := planned_by_caller(request, Planned)) is not None:
            return known
        pins = self.known_pins(self.run_id)
        return self.wait(
            lambda: plan_run(request, self.store, self.home, log=self.warn, known=pins)
        )

    def known_pins(self, run: str) -> Pins:
        """Return the upstream names that an earlier start of the run with this id resolved."""
        found = self.wait(lambda: find_record(self.store, run, log=self.warn))
        return found.upstream if found else {}

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
            # The events of a deployed run are shown by Prefect alone.
            watch=self.caller.watch if self.caller else lambda stage, event: None,
            strict=strict,
            stop=self.stop,
        )

    def check_before_building(self, items: Sequence[StagePlan], *, builds: bool) -> None:
        """Note the progress in a plan; raise StoreError if leases are needed and cannot be held.

        They are needed if the flow `builds` anything.
        """
        note_progress(items)
        if builds:
            self.wait(self.store.check_conditions)

    def continued(self, run: Run) -> Run:
        """Return the record of a run, begun when an earlier start of the flow run began it."""
        found = self.wait(lambda: find_record(self.store, run.run, log=self.warn))
        return replace(run, started=found.started) if found else run


def planned_by_caller(request: object, kind: type[Known]) -> Known | None:
    """Return what the command of the current flow has planned of this very request, else None."""
    caller = LOCAL_RUN.get()
    known = caller.planned if caller else None
    return known if isinstance(known, kind) and known.request == request else None


def open_flow(
    *,
    store: str | None,
    runs_of: Callable[[str], Sequence[str]] = lambda run_id: [run_id],
) -> FlowSetup:
    """Open the store of the current flow run.

    Args:
        store: URL of the store; None: that of this machine.
        runs_of: Returns the ids of the runs that the flow run records, given its own.
    """
    caller = LOCAL_RUN.get()
    home = caller.home if caller else default_home()
    if caller and caller.planned:
        opened = caller.planned.store
    else:
        opened = open_store(store or default_store(home))
    run_id = flow_run.get_name()
    assert run_id is not None  # this is called in flows only
    if caller is not None:
        for run in dict.fromkeys((run_id, *runs_of(run_id))):
            lock = run_lock.hold(home, run, store=opened.url, unreported=caller.unreported)
            caller.locks.enter_context(lock)
        if (root := PREFECT_UI_URL.value()) and (own := flow_run.get_id()):
            page = page_of(root, own)
            text = f"in Prefect: {page} (the server keeps running; `nanochat down` stops it)"
            caller.watch("run", {"kind": "message", "text": text})
    stop = caller.stop if caller else threading.Event()
    wait = wait_of_run(opened, stop)
    return FlowSetup(run_id=run_id, home=home, store=opened, wait=wait, caller=caller, stop=stop)


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


def wait_of_run(
    store: Store,
    stop: threading.Event,
    *,
    terms: LeaseTimings = LeaseTimings(),  # noqa: B008 - frozen
) -> StoreWait:
    """Return a retry policy for the run's own store requests that waits without a limit."""
    waiting = WaitLog(get_run_logger().warning, every=terms.report)
    return StoreWait(store=store, name="the run", waiting=waiting, stop=stop, terms=terms)
