"""Commands and their own flows, without a server; test_pipeline.py has one."""

import contextlib
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.exceptions import TerminationSignal
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT

from flows.leases import run_lock
from flows.orchestration import caller

pytestmark = pytest.mark.prefect

UNKNOWN = "Prefect does not know that the run has ended: refused"
WAITING = "the run has ended; waiting for Prefect's server to record that"


@pytest.mark.parametrize(
    ("end", "report_seconds", "expected", "said"),
    [
        (KeyboardInterrupt(), None, KeyboardInterrupt, []),
        (ValueError("why"), None, ValueError, []),
        ("made", None, "made", []),
        ("made", 0.0, "made", [UNKNOWN]),
        ("made", 1.0, "made", [WAITING, UNKNOWN]),  # its server hangs
        (ValueError("why"), 0.0, ValueError, [UNKNOWN]),
        (KeyboardInterrupt(), 0.0, KeyboardInterrupt, [UNKNOWN]),
        (TerminationSignal(15), 0.0, KeyboardInterrupt, [UNKNOWN]),
    ],
)
def test_a_run_that_ended_counts_although_prefect_does_not_know(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: Any,
    report_seconds: float | None,
    expected: Any,
    said: list[str],
) -> None:
    texts: list[str] = []
    local = caller.LocalRun(home=tmp_path, watch=lambda _, event: texts.append(event["text"]))
    monkeypatch.setattr(caller, "is_cancelled", lambda run: False)
    monkeypatch.setattr(caller, "SLOW_SECONDS", 0.2)

    def body() -> Any:
        if isinstance(end, BaseException):
            raise end
        return end

    def flow() -> Any:
        try:
            return caller.end_when_cancelled(body)
        finally:
            if report_seconds is not None:  # Prefect's engine, when its server is gone
                time.sleep(report_seconds)
                raise httpx.ConnectError("refused")

    with caller.running_locally(local):
        assert PREFECT_API_REQUEST_TIMEOUT.value() == 10  # a server that hangs: not a minute
        lock = run_lock.hold(tmp_path, "run-1", store="file:///s", unreported=local.unreported)
        local.locks.enter_context(lock)
        if isinstance(end, BaseException):
            with pytest.raises(expected):
                caller.call_flow(flow)
        else:
            assert caller.call_flow(flow) == expected
    assert texts == said
    # For the next command, which reports the end.
    lines = [each.read_text().splitlines() for each in tmp_path.glob("runs/*")]
    assert lines == ([["file:///s", "finished"]] if end == "made" and said else [])


@pytest.mark.parametrize(
    ("cancelled", "intent", "ends_itself"),
    [(True, None, True), (False, None, False), (True, "cancel", False)],
)
def test_a_deployed_run_that_was_cancelled_ends_so_also_if_it_cannot_acknowledge(
    cancelled, intent, ends_itself, monkeypatch
):
    """Its worker ends one that did: one that is Cancelled sooner could be retried, in vain."""

    def stopped() -> Any:
        def body() -> Any:
            raise TerminationSignal(signal=15)

        return caller.end_when_cancelled(body)

    # Not before it began; see test_stage_runs.py.
    monkeypatch.setattr(caller, "is_cancelled", lambda run, before=False: cancelled and not before)
    monkeypatch.setattr(caller, "get_intent", lambda: intent)
    if ends_itself:
        assert stopped().is_cancelled()
    else:
        with pytest.raises(TerminationSignal):
            stopped()


@pytest.mark.parametrize(
    "end", [KeyboardInterrupt(), caller.StageInterrupted("stopped"), None, ValueError()], ids=repr
)
def test_after_cancel_a_run_that_does_not_fail_ends_as_cancelled(monkeypatch, tmp_path, end):
    called = caller.LocalRun(home=tmp_path, watch=lambda *_: None)
    monkeypatch.setattr(caller, "is_cancelled", lambda run: True)
    monkeypatch.setattr(caller, "SLOW_SECONDS", 0.01)

    def body() -> Any:
        assert called.stop.wait(60)
        if end is not None:  # else all was built meanwhile
            raise end

    state: Any = None
    with contextlib.suppress(KeyboardInterrupt, ValueError), caller.running_locally(called):
        state = caller.end_when_cancelled(body)
    assert bool(state and state.is_cancelled()) == (not isinstance(end, ValueError))
