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
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx

from flows.orchestration import caller


def leave(why):
    print(why, flush=True)
    os._exit(130)


RUN = "0" * 8 + 3 * "-0000" + "-" + 12 * "0"
caller.SECONDS_TO_REPORT = 4
os.environ.pop("PREFECT_API_URL", None)  # of a server that another test left running: it answers
caller.configured_api_url = lambda: None  # tests before may have left one
called = caller.LocalRun(
    home=Path(), watch=lambda stage, event: print(event["text"], flush=True), leave=leave
)


def stopped(error):
    def body():
        try:
            raise error
        finally:
            time.sleep(6)
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
        raise httpx.ConnectError("refused")


@contextlib.contextmanager
def quick_client():
    yield SimpleNamespace(
        set_flow_run_state=lambda run, state, *, force: print(run, state.type.name, force)
    )


def run_unreported(end, server):
    caller.is_cancelled = lambda run: False
    if server == "back":
        caller.flow_run = SimpleNamespace(get_id=lambda: RUN)
        caller.quick_client = quick_client
    with caller.running_locally(called):
        try:
            print(caller.call_flow(unreported, end), flush=True)
        except (ValueError, KeyboardInterrupt) as error:
            print("raised", repr(error), flush=True)


def run(error, engine):
    if engine in (None, "back"):
        return run_unreported(error, engine)
    if engine == "busy":
        caller.configured_api_url, caller.answers = lambda: "http://busy", lambda api_url: True
        engine = 2 * caller.SECONDS_TO_REPORT
    try:
        with caller.running_locally(called):
            try:
                stopped(error)
            finally:
                time.sleep(engine)  # Prefect's engine, which tries to report to its server
    except BaseException:
        time.sleep(6)
    print("ended", flush=True)


def fork(error, engine):
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(write, 1)
        run(error, engine)
        os._exit(0)
    os.close(write)
    return child, read


cases = {
    "interrupt, no server": (KeyboardInterrupt(), 600),
    "termination, no server": (caller.TerminationSignal(15), 600),
    "interrupt, busy server": (KeyboardInterrupt(), "busy"),
    "interrupt": (KeyboardInterrupt(), 0),
    "mistake": (ValueError(), 6),
    "finished, no server": ("made", None),
    "finished, server back": ("made", "back"),
    "failed, no server": (ValueError("why"), None),
    "stopped, no server": (KeyboardInterrupt(), None),
    "terminated, no server": (caller.TerminationSignal(15), None),
}
children = {name: fork(*case) for name, case in cases.items()}
ends = {}
for name, (child, read) in children.items():
    lines = open(read).read().splitlines()
    ends[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), lines
json.dump(ends, sys.stdout)
"""


@pytest.fixture(scope="module")
def ends() -> dict[str, list[Any]]:
    """Exit status and lines of each case."""
    command = [sys.executable, "-c", SCRIPT]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_a_stopped_command_does_not_wait_for_a_server_that_is_gone(ends):
    for case in ("interrupt, no server", "termination, no server"):
        code, (saved, why) = ends[case]
        assert (code, saved) == (130, "saved")
        assert "Prefect's server does not answer" in why
    # What was reported, late or at once, or failed, ends as ever.
    assert ends["interrupt, busy server"] == [0, ["saved", "ended"]]
    assert ends["interrupt"] == [0, ["saved", "ended"]]
    waiting = "the run has ended; waiting for Prefect's server to record that"
    assert ends["mistake"] == [0, ["saved", waiting, "ended"]]


def test_a_run_that_ended_counts_although_prefect_does_not_know(ends):
    warning = "Prefect does not know that the run has ended: refused"

    assert ends["finished, no server"] == [0, [warning, "made"]]
    assert ends["failed, no server"] == [0, [warning, "raised ValueError('why')"]]
    for case in ("stopped, no server", "terminated, no server"):
        assert ends[case] == [0, [warning, "raised KeyboardInterrupt()"]]


def test_a_finished_run_is_completed_also_if_its_server_comes_back_late(ends):
    code, (reported, made) = ends["finished, server back"]

    assert (code, made) == (0, "made")
    assert reported.endswith(" COMPLETED True")  # not Failed, as by Prefect's engine


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_deployed_run_that_was_cancelled_ends_so_also_if_it_cannot_acknowledge(
    cancelled, monkeypatch
):
    from prefect.exceptions import TerminationSignal

    from flows.orchestration import caller

    def stopped() -> Any:
        def body() -> Any:
            raise TerminationSignal(signal=15)

        return caller.end_when_cancelled(body)

    monkeypatch.setattr(caller, "is_cancelled", lambda run: cancelled)
    if cancelled:
        assert stopped().is_cancelled()
    else:
        with pytest.raises(TerminationSignal):
            stopped()


def test_an_impatient_ctrl_c_after_cancel_still_ends_the_run_as_cancelled(monkeypatch, tmp_path):
    from flows.orchestration import caller

    called = caller.LocalRun(home=tmp_path, watch=lambda *_: None, leave=print)
    monkeypatch.setattr(caller, "is_cancelled", lambda run: True)
    monkeypatch.setattr(caller, "SLOW_SECONDS", 0.01)

    def body() -> Any:
        assert called.stop.wait(60)
        raise KeyboardInterrupt

    state: Any = None
    with contextlib.suppress(KeyboardInterrupt), caller.running_locally(called):
        state = caller.end_when_cancelled(body)
    assert state.is_cancelled()
