"""Orders on a real Prefect server; the far side's worker is played by the test."""

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prefect.exceptions import TerminationSignal

from flows.building.build import BuildContext, build, look_up
from flows.building.retry import TransientStageError
from flows.orchestration import dispatch, stage_runs
from flows.orchestration.stage_runs import cancel_requests_of, check_pool
from infra.launch.torchrun import StageInterrupted
from nanochat_core.errors import ConfigError, StageError, StoreError
from tests.support.deployments.prefect_api import PrefectApi
from tests.support.flows.fixtures import ENTRY
from tests.support.flows.house import make_run
from tests.support.flows.pools import SECONDS, deploy, wait_until

pytestmark = pytest.mark.prefect

POOL = "played"  # no worker takes from it


class Caller:
    """A run that orders one toy stage."""

    def __init__(
        self, toys: Any, threads: ThreadPoolExecutor, api: PrefectApi, run_id: str, test: str
    ) -> None:
        self.api = api
        self.run = make_run(f"{run_id}-{test}")
        source = f'{ENTRY}\nTEST = "{test}"'  # the server outlives the test
        self.stage = toys.stage("gpu", compute="gpu", source=source)
        self.follows = threading.Event()  # an order
        self.context: BuildContext = replace(
            toys.context(self.run.run),
            placement=replace(toys.placement, pool=POOL),
            stop=threading.Event(),
            watch=self._watch,
        )
        self._threads = threads

    def _watch(self, stage: str, event: Mapping[str, Any]) -> None:
        if event["kind"] == "waiting" and "requested as" in event["text"]:
            self.follows.set()

    @property
    def tag(self) -> str:
        """The tag of the orders of its stage."""
        fingerprint = look_up(self.stage, self.context, {}, force=False).identity.fingerprint
        return f"stage:gpu/{fingerprint[:12]}"

    def send(self, *, force: bool = False) -> "Future[Any]":
        """Order the stage, in a thread."""
        settings = copy_context()  # Prefect's, which threads do not inherit
        return self._threads.submit(
            settings.run, dispatch.dispatch, self.stage, self.context, self.run, {}, force=force
        )

    def runs(self) -> list[Any]:
        """Return the orders of its stage, the oldest first."""
        found = self.api.runs(flow_runs={"tags": {"all_": [self.tag]}})
        return sorted(found, key=lambda run: run["created"])

    def wait_for_runs(self, count: int) -> list[Any]:
        """Return the orders once there are so many."""
        return wait_until(lambda: runs if len(runs := self.runs()) >= count else None)

    def end(self, run: Any, kind: str, message: str = "") -> None:
        """End an order's run as the far side does."""
        self.api.set_state(run["id"], kind, message)

    def carry_out(self) -> None:
        """What the far side does, for this run."""
        alone = replace(self.context.placement, nodes=1)
        context = replace(self.context, placement=alone, device=threading.Semaphore())
        build(self.stage, context, {}, force=False)


@pytest.fixture
def make_caller(
    toys: Any, api: PrefectApi, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Caller]]:
    """Callers of one toy stage that share a store, and are stopped at the end."""
    deploy(POOL)
    monkeypatch.setattr(dispatch, "ASK_SECONDS", 0.25)
    made: list[Caller] = []
    test = uuid.uuid4().hex[:8]
    with ThreadPoolExecutor() as threads:

        def make(run_id: str) -> Caller:
            made.append(Caller(toys, threads, api, run_id, test))
            return made[-1]

        yield make
        for caller in made:
            caller.context.stop.set()


def test_what_exists_is_not_ordered(make_caller):
    caller = make_caller("one")
    caller.carry_out()
    assert caller.send().result().cached
    assert not caller.runs()


def test_a_caller_that_comes_back_and_another_share_its_order_for_several_machines(make_caller):
    first, second = make_caller("one"), make_caller("two")
    for caller in (first, second):
        placement = replace(caller.context.placement, nodes=2)
        caller.context = replace(caller.context, placement=placement)
    lost = first.send()
    [run] = first.wait_for_runs(1)
    first.context.stop.set()
    with pytest.raises(StageInterrupted):
        lost.result()
    first.context.stop.clear()
    first.follows.clear()
    results = [first.send(), second.send()]
    # A later request finds the stage built, or has a worker check whether it is.
    assert all(caller.follows.wait(SECONDS) for caller in (first, second))
    assert first.tag in run["tags"]
    asked = run["parameters"]["request"]
    assert (asked["stage"], asked["nodes"]) == ("gpu", 2)
    first.carry_out()
    first.end(run, "COMPLETED")
    assert results[0].result().manifest == results[1].result().manifest
    assert not results[0].result().cached
    assert len(first.wait_for_runs(1)) == 1


@pytest.mark.parametrize(
    ("first", "message", "kind", "error", "hint"),
    [
        ("CRASHED", "the node is gone", TransientStageError, r"\w{12} was lost: the node", None),
        ("COMPLETED", "", TransientStageError, "is not in the store, though its run", "same store"),
        ("FAILED", "gpu failed\nhint: replay it with: x", StageError, "^gpu failed$", "replay it"),
    ],
)
def test_the_store_is_believed_and_not_the_run_and_the_next_order_is_another_run(
    make_caller, first, message, kind, error, hint
):
    caller = make_caller("one")
    result = caller.send()
    caller.end(caller.wait_for_runs(1)[0], first, message)
    with pytest.raises(StageError, match=error) as caught:
        result.result()
    assert type(caught.value) is kind
    assert (hint or "") in (caught.value.hint or "")
    again = caller.send()
    second = caller.wait_for_runs(2)[1]
    caller.carry_out()
    caller.end(second, "CRASHED", "it published, then it died")
    assert not again.result().cached


def test_a_cancelled_order_is_not_lost_but_another_callers_is_ordered_again(make_caller):
    first, second = make_caller("one"), make_caller("two")
    cancelled = first.send()
    [run] = first.wait_for_runs(1)
    waiting = second.send()
    assert second.follows.wait(SECONDS)
    second.end(run, "CANCELLED", "by the user")
    with pytest.raises(StageError, match="was cancelled: by the user") as caught:
        cancelled.result()
    assert not isinstance(caught.value, TransientStageError)
    own = second.wait_for_runs(2)[1]
    assert f"run:{second.run.run}" in own["tags"]
    second.carry_out()
    second.end(own, "COMPLETED")
    waiting.result()


def test_stopping_a_run_cancels_its_own_orders_only(make_caller):
    caller = make_caller("one")
    result = caller.send()
    [run] = caller.wait_for_runs(1)
    cancel_requests_of("another")
    assert caller.api.state(run["id"])["type"] == "SCHEDULED"
    cancel_requests_of(caller.run.run)
    assert caller.api.state(run["id"])["type"] == "CANCELLED"
    with pytest.raises(StageError):
        result.result()


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_process_that_must_end_leaves_its_orders_unless_the_run_is_cancelled(
    monkeypatch, is_cancelled
):
    monkeypatch.setattr(stage_runs, "is_cancelled", lambda run: is_cancelled)
    assert stage_runs.is_terminal(TerminationSignal(15)) == is_cancelled
    assert stage_runs.is_terminal(KeyboardInterrupt())
    assert stage_runs.is_terminal(StageError("broken"))


def test_a_stage_that_was_built_while_prefect_was_away_is_found_when_it_answers(
    make_caller, monkeypatch
):
    caller = make_caller("one")
    logged: list[str] = []
    caller.context = replace(
        caller.context, watch=lambda _, event: logged.append(str(event.get("text")))
    )
    result = caller.send()
    [run] = caller.wait_for_runs(1)

    def away(*given: Any) -> Any:
        raise httpx.ConnectError("connection refused")

    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "reporting_refusals", away)
        said = "Prefect does not answer (connection refused); retrying"
        wait_until(lambda: said in logged)
        caller.carry_out()
    caller.end(run, "COMPLETED")
    assert not result.result().cached
    assert logged.count(said) == 1


def test_a_forced_stage_is_built_again_though_another_run_made_it(make_caller):
    first, second = make_caller("one"), make_caller("two")
    first.carry_out()
    result = second.send(force=True)
    [run] = second.wait_for_runs(1)
    build(second.stage, second.context, {}, force=False)  # what the caller has asked for
    second.end(run, "COMPLETED")
    assert result.result().manifest.provenance.run == second.run.run
    assert second.send(force=True).result().cached


def test_a_store_that_refuses_to_be_read_orders_nothing(make_caller, monkeypatch):
    def refuse(key: str) -> None:
        raise StoreError("it refuses to be read")

    caller = make_caller("one")
    with monkeypatch.context() as patch:
        patch.setattr(caller.context.store, "get_stored", refuse)
        with pytest.raises(StoreError, match="refuses to be read"):
            caller.send().result()
    assert not caller.runs()


def test_a_flow_does_not_order_of_the_pool_that_it_runs_in(make_caller, monkeypatch):
    caller = make_caller("own")
    check_pool(POOL)
    with pytest.raises(ConfigError, match="no stage can be requested from the pool 'absent'"):
        check_pool("absent")
    caller.send()
    [run] = caller.wait_for_runs(1)
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", run["id"])
    with pytest.raises(ConfigError, match=f"cannot run in the work pool '{POOL}'") as caught:
        check_pool(POOL)
    assert "such as gpu" in (caught.value.hint or "")
