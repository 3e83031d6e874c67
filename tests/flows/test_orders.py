"""Which run an order goes on with, and what becomes of one that nobody builds."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from flows.lost import StageLost
from nanochat_core.errors import ConfigError
from tests.flows.test_dispatch import Caller, end, make_caller, pool, quick, threads

__all__ = ["make_caller", "pool", "quick", "threads"]

pytestmark = pytest.mark.prefect


def test_an_order_that_is_being_cancelled_is_not_gone_on_with(
    make_caller: Callable[[str], Caller],
) -> None:
    first, second = make_caller("one"), make_caller("two")
    first.order()
    [run] = first.wait_for_runs(1)
    end(run, "CANCELLING")
    result = second.order()
    own = second.wait_for_runs(2)[1]
    assert f"run:{second.run.run}" in own.tags
    second.carry_out()
    end(own, "COMPLETED")
    result.result()


def test_a_caller_whose_clock_was_ahead_does_not_get_an_old_run_for_ever(
    make_caller: Callable[[str], Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    from datetime import UTC, datetime, timedelta

    from flows import orders

    caller = make_caller("one")
    order = orders.run_deployment
    ahead = datetime.now(UTC) + timedelta(hours=1)
    with monkeypatch.context() as patch:
        patch.setattr(
            orders, "run_deployment", lambda *a, **k: order(*a, scheduled_time=ahead, **k)
        )
        result = caller.order()
        end(caller.wait_for_runs(1)[0], "CRASHED")
        with pytest.raises(StageLost):
            result.result()
    for count in (2, 3):
        result = caller.order()
        end(caller.wait_for_runs(count)[-1], "CRASHED")
        with pytest.raises(StageLost):
            result.result()


@pytest.fixture
def impatient(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows import dispatch

    monkeypatch.setattr(dispatch, "SECONDS_WITHOUT_LEASE", 0.5)
    monkeypatch.setattr(dispatch, "SECONDS_BETWEEN_TELLING", 0.1)


@pytest.mark.usefixtures("impatient")
def test_an_order_that_runs_without_a_lease_is_given_up_and_ordered_again(
    make_caller: Callable[[str], Caller],
) -> None:
    from tests.flows.pools import read_run

    caller = make_caller("one")
    result = caller.order()
    [run] = caller.wait_for_runs(1)
    end(run, "RUNNING")
    with pytest.raises(StageLost, match="nobody has held its lease for ten minutes"):
        result.result()
    assert read_run(run.id).state.is_crashed()
    caller.order()
    caller.wait_for_runs(2)


@pytest.mark.usefixtures("impatient")
def test_an_order_whose_lease_is_held_is_left_alone(make_caller: Callable[[str], Caller]) -> None:
    from flows.lease import TTL, Claim, try_acquire
    from tests.flows.pools import read_run

    caller = make_caller("one")
    result = caller.order()
    [run] = caller.wait_for_runs(1)
    claim = Claim(owner="0" * 32, run="one", host="far", pid=1, home="far", since="then")
    try_acquire(caller.site.store, "gpu", run.parameters["fingerprint"], claim, ttl=TTL)
    end(run, "RUNNING")
    time.sleep(2.0)  # four times what it would take
    assert not result.done()
    assert read_run(run.id).state.is_running()


def test_a_refusal_ends_the_following(
    make_caller: Callable[[str], Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    from flows import dispatch

    def refuse(*given: Any) -> Any:
        request = httpx.Request("GET", "http://127.0.0.1/api")
        answer = httpx.Response(401, request=request, json={"exception_message": "Unauthorized"})
        raise httpx.HTTPStatusError("401", request=request, response=answer)

    caller = make_caller("one")
    monkeypatch.setattr(dispatch, "_look", refuse)
    with pytest.raises(ConfigError, match=r"Prefect refuses \(401\): .*Unauthorized"):
        caller.order().result()


def test_more_parameters_than_the_server_takes_are_refused_and_not_retried(
    make_caller: Callable[[str], Caller],
) -> None:
    from dataclasses import replace

    caller = make_caller("one")
    caller.run = replace(caller.run, overrides=("x.y=" + "0" * 600_000,))
    with pytest.raises(ConfigError, match=r"Prefect refuses \(422\)"):
        caller.order().result()
