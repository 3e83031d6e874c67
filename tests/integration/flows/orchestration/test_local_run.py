"""Commands and their own flows, without a server; test_pipeline.py has one."""

import contextlib
import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.prefect

# Each case is a process of its own, forked from one that has imported Prefect.
SCRIPT = """
import json
import os
import sys
import time
from pathlib import Path

import httpx

from flows.leases import run_lock
from flows.orchestration import caller
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT

HOME = Path(sys.argv[1])
os.environ.pop("PREFECT_API_URL", None)  # of a server that another test left running: it answers
caller.is_cancelled = lambda run: False
called = caller.LocalRun(home=HOME, watch=lambda stage, event: print(event["text"], flush=True))


def stopped(error):
    def body():
        try:
            raise error
        finally:
            print("saved", flush=True)

    return caller.end_when_cancelled(body)


def ended(end):
    def body():
        if isinstance(end, BaseException):
            raise end
        return end

    return caller.end_when_cancelled(body)


def unreported(end):
    try:
        ended(end)
    finally:  # Prefect's engine, when its server is gone
        time.sleep(SECONDS)
        raise httpx.ConnectError("refused")


def run(name, end, is_reported):
    global SECONDS
    SECONDS = 0
    if "hangs" in name:
        SECONDS, caller.SLOW_SECONDS = 2, 0.1
    with caller.running_locally(called):
        lock = run_lock.hold(HOME, name, store="file:///store", unreported=called.unreported)
        called.locks.enter_context(lock)
        try:
            made = caller.call_flow(stopped if is_reported else unreported, end)
            print(made, flush=True)
        except (ValueError, KeyboardInterrupt, caller.TerminationSignal) as error:
            print("raised", type(error).__name__, *error.args, flush=True)


def fork(name, end, is_reported):
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(write, 1)
        run(name, end, is_reported)
        os._exit(0)
    os.close(write)
    return child, read


cases = {
    "interrupt": (KeyboardInterrupt(), True),
    "mistake": (ValueError("why"), True),
    "finished, server hangs": ("made", False),
    "finished, no server": ("made", False),
    "failed, no server": (ValueError("why"), False),
    "stopped, no server": (KeyboardInterrupt(), False),
    "terminated, no server": (caller.TerminationSignal(15), False),
}
children = {name: fork(name, *case) for name, case in cases.items()}
ends = {}
for name, (child, read) in children.items():
    lines = open(read).read().splitlines()
    ends[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), lines
with caller.running_locally(called):
    ends["timeout"] = PREFECT_API_REQUEST_TIMEOUT.value()
ends["lock"] = (HOME / "runs" / "finished, no server.lock").read_text().splitlines()
json.dump(ends, sys.stdout)
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Exit status and lines of each case."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path_factory.mktemp("home"))]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_an_end_that_is_reported_ends_the_command_as_it_is(ends):
    assert ends["interrupt"] == [0, ["saved", "raised KeyboardInterrupt"]]
    assert ends["mistake"] == [0, ["saved", "raised ValueError why"]]


def test_a_run_that_ended_counts_although_prefect_does_not_know(ends):
    warning = "Prefect does not know that the run has ended: refused"

    assert ends["finished, no server"] == [0, [warning, "made"]]
    assert ends["failed, no server"] == [0, [warning, "raised ValueError why"]]
    for case in ("stopped, no server", "terminated, no server"):
        assert ends[case] == [0, [warning, "raised KeyboardInterrupt"]]
    # For the next command, which reports the end.
    assert ends["lock"] == ["file:///store", "finished"]


def test_a_run_that_waits_for_a_server_that_hangs_logs_it_and_waits_less_than_a_minute(ends):
    waiting = "the run has ended; waiting for Prefect's server to record that"
    assert ends["finished, server hangs"][1][0] == waiting
    assert ends["timeout"] == 10


@pytest.mark.parametrize(
    ("cancelled", "intent", "ends_itself"),
    [(True, None, True), (False, None, False), (True, "cancel", False)],
)
def test_a_deployed_run_that_was_cancelled_ends_so_also_if_it_cannot_acknowledge(
    cancelled, intent, ends_itself, monkeypatch
):
    """Its worker ends one that did: one that is Cancelled sooner could be retried, in vain."""
    from prefect.exceptions import TerminationSignal

    from flows.orchestration import caller

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


def test_an_impatient_ctrl_c_after_cancel_still_ends_the_run_as_cancelled(monkeypatch, tmp_path):
    from flows.orchestration import caller

    called = caller.LocalRun(home=tmp_path, watch=lambda *_: None)
    monkeypatch.setattr(caller, "is_cancelled", lambda run: True)
    monkeypatch.setattr(caller, "SLOW_SECONDS", 0.01)

    def body() -> Any:
        assert called.stop.wait(60)
        raise KeyboardInterrupt

    state: Any = None
    with contextlib.suppress(KeyboardInterrupt), caller.running_locally(called):
        state = caller.end_when_cancelled(body)
    assert state.is_cancelled()
