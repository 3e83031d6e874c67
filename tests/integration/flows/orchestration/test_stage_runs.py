"""Which run an order is shared with, and when it is ordered again."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.futures import PrefectConcurrentFuture, wait
from prefect.states import Completed
from prefect.utilities.engine import can_ack_control_intent, capture_sigterm

from flows.building.retry import TransientStageError
from flows.orchestration import caller, one_stage, stage_runs
from flows.orchestration.stage_runs import keeping_signals
from infra.launch.torchrun import StageInterrupted
from nanochat_core.errors import ConfigError
from tests.support.deployments.prefect_api import PrefectApi

pytestmark = pytest.mark.prefect


def test_an_order_that_is_being_cancelled_is_left_alone(make_caller):
    first, second = make_caller("one"), make_caller("two")
    first.send()
    [run] = first.wait_for_runs(1)
    for state in ("RUNNING", "CANCELLING"):  # at once Cancelled if it has not begun
        first.end(run, state)
    other = second.send()
    own = second.wait_for_runs(2)[1]
    assert f"run:{second.run.run}" in own["tags"]
    second.carry_out()
    second.end(own, "COMPLETED")
    assert not other.result().cached


def test_a_caller_whose_clock_was_ahead_does_not_get_an_old_run_for_ever(make_caller, monkeypatch):
    caller = make_caller("one")
    request = stage_runs.run_deployment
    ahead = datetime.now(UTC) + timedelta(hours=1)
    with monkeypatch.context() as patch:
        patch.setattr(
            stage_runs, "run_deployment", lambda *a, **k: request(*a, scheduled_time=ahead, **k)
        )
        result = caller.send()
        caller.end(caller.wait_for_runs(1)[0], "CRASHED")
        with pytest.raises(TransientStageError):
            result.result()
    for count in (2, 3):
        result = caller.send()
        caller.end(caller.wait_for_runs(count)[-1], "CRASHED")
        with pytest.raises(TransientStageError):
            result.result()


@pytest.mark.parametrize("method", ["read_flow_run", "read_flow_runs"])
def test_a_refusal_ends_the_following_and_the_request(make_caller, monkeypatch, method):
    def refuse(*given: Any, **options: Any) -> Any:
        request = httpx.Request("GET", "http://127.0.0.1/api")
        answer = httpx.Response(401, request=request, json={"exception_message": "Unauthorized"})
        raise httpx.HTTPStatusError("401", request=request, response=answer)

    caller = make_caller("one")
    monkeypatch.setattr(SyncPrefectClient, method, refuse)
    with pytest.raises(ConfigError, match=r"Prefect refuses \(401\): .*Unauthorized"):
        caller.send().result()


@pytest.fixture
def handler() -> Iterator[Callable[[int, object], None]]:
    """The handler of SIGTERM, which raises as Prefect's does."""

    def handle(number: int, frame: object) -> None:
        raise TerminationSignal(signal=number)

    before = signal.signal(signal.SIGTERM, handle)
    yield handle
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("swallows", [True, False])
def test_a_signal_that_code_swallows_stops_the_run_all_the_same(handler, swallows):
    def build() -> None:
        with keeping_signals(stop):
            try:
                signal.raise_signal(signal.SIGTERM)
            except TerminationSignal:
                if not swallows:
                    raise
            assert stop.wait(60)  # what the stages look at

    stop = threading.Event()
    with pytest.raises(TerminationSignal):
        build()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_prefect_s_handler_stays_or_it_would_report_a_cancelled_run_as_crashed():
    with capture_sigterm(), keeping_signals(threading.Event()):
        assert can_ack_control_intent()


@pytest.mark.usefixtures("handler")
def test_a_signal_that_does_not_wake_the_main_thread_stops_the_run_all_the_same():
    # As one that comes just before the thread blocks: its handler runs when that wakes up.
    stop, waiting = threading.Event(), threading.Event()
    built: Future[Any] = Future()

    def stop_and_end() -> None:
        assert waiting.wait(60)
        time.sleep(0.2)  # the main thread blocks by then; if it does not, nothing is shown
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # wakes this thread alone
        is_noticed = stop.wait(60)
        built.set_result(Completed())
        assert is_noticed

    def build() -> None:
        with keeping_signals(stop):
            waiting.set()
            wait([PrefectConcurrentFuture(uuid4(), built)])

    thread = threading.Thread(target=stop_and_end)
    thread.start()
    with pytest.raises(TerminationSignal):
        build()
    thread.join()


def test_a_request_that_was_deleted_meanwhile_does_not_keep_the_others_from_being_cancelled(
    monkeypatch,
):
    runs = [SimpleNamespace(id=number, tags=["request:a"]) for number in (1, 2)]
    cancel = Mock(side_effect=[ObjectNotFound(Exception("deleted")), None])
    client = SimpleNamespace(set_flow_run_state=cancel)
    monkeypatch.setattr(stage_runs, "quick_client", lambda: contextlib.nullcontext(client))
    monkeypatch.setattr(stage_runs, "_find_runs", lambda *query: runs)
    stage_runs.cancel_requests_of("run")
    assert [call.args[0] for call in cancel.call_args_list] == [1, 2]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StageInterrupted("cancelled")])
def test_a_stopped_command_cancels_its_remote_stages(error, tmp_path, monkeypatch):
    cancelled: list[str] = []
    monkeypatch.setattr(stage_runs, "cancel_requests_of", cancelled.append)
    resources = SimpleNamespace(grace_seconds=1.0)
    placement = SimpleNamespace(pool="gpu", resources=resources)
    context: Any = SimpleNamespace(stop=threading.Event(), placement=placement, store=None)
    ended: list[str] = []
    record: Any = SimpleNamespace(end=ended.append)
    assert stage_runs.stop_stages(error, context, [], {"run-1": record})
    assert (cancelled, ended) == (["run-1"], ["interrupted"])


@pytest.mark.parametrize(
    ("states", "is_built"),
    [
        ("pending cancelling cancelled running", False),  # its process took long to start
        ("pending running", True),
        ("pending running cancelling cancelled scheduled pending running", True),  # Retry
    ],
)
def test_a_run_that_was_cancelled_before_its_process_began_it_builds_nothing(
    api: PrefectApi, monkeypatch: pytest.MonkeyPatch, states: str, is_built: bool
) -> None:
    name = f"late-{uuid4().hex}"
    flow = api.post("/flows/", {"name": name})["id"]
    run = api.start(api.post("/deployments/", {"name": name, "flow_id": flow})).json()["id"]
    for state in states.split():
        api.set_state(run, state)
    for module in (caller, one_stage):
        monkeypatch.setattr(module.flow_run, "get_id", lambda: run)

    def build() -> Any:
        raise RuntimeError("it builds")

    monkeypatch.setattr(one_stage, "stage_of", lambda request: build())
    request: Any = SimpleNamespace(run="late")
    for begin in (lambda: caller.end_when_cancelled(build), lambda: one_stage._build(request)):
        if is_built:
            with pytest.raises(RuntimeError, match="it builds"):
                begin()
        else:
            assert begin().is_cancelled()
