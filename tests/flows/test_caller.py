"""What a command does about its own flow, beside what test_pipeline.py shows on a server."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.prefect

SCRIPT = """
import os
import time
from pathlib import Path

from flows.orchestration import caller


def leave(why):
    print(why, flush=True)
    os._exit(130)


caller.SECONDS_TO_REPORT = 0.5
called = caller.LocalRun(home=Path(), watch=lambda stage, event: None, leave=leave)


@caller.cancellable
def stopped():
    try:
        raise {error}
    finally:
        time.sleep(1.5)
        print("saved", flush=True)


try:
    with caller.running_locally(called):
        try:
            stopped()
        finally:
            time.sleep({engine})  # Prefect's engine, which tries to tell its server
except BaseException:
    time.sleep(1.5)
print("ended", flush=True)
"""


def run(*, error: str, engine: float) -> tuple[int, list[str]]:
    """Exit code and lines of a command whose flow is stopped, or fails."""
    script = SCRIPT.replace("{error}", error).replace("{engine}", str(engine))
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return ended.returncode, ended.stdout.splitlines()


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "caller.TerminationSignal(15)"])
def test_a_stopped_command_does_not_wait_for_a_server_that_is_gone(error: str) -> None:
    code, (saved, why) = run(error=error, engine=60)
    assert (code, saved) == (130, "saved")
    assert "Prefect's server does not answer" in why


@pytest.mark.parametrize(("error", "engine"), [("KeyboardInterrupt", 0.0), ("ValueError", 1.5)])
def test_what_was_told_or_failed_ends_as_ever(error: str, engine: float) -> None:
    assert run(error=error, engine=engine) == (0, ["saved", "ended"])
