"""What a command does about its own flow, beside what test_pipeline.py shows on a server."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.prefect

SCRIPT = """
import time
from pathlib import Path

from flows import caller

caller.SECONDS_TO_TELL = 0.5
caller.CALLER.set(caller.Caller(home=Path(), watch=lambda stage, event: print(event, flush=True)))


@caller.stoppable_by_hand
def stopped():
    raise {error}


try:
    stopped()
except BaseException:
    time.sleep(60)  # as Prefect's engine does when the server is gone
"""


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "caller.TerminationSignal(15)"])
def test_a_stopped_command_does_not_wait_for_a_server_that_is_gone(error: str) -> None:
    command = [sys.executable, "-c", SCRIPT.replace("{error}", error)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 130, ended.stderr
    assert "Prefect's server does not answer" in ended.stdout


def test_another_error_ends_it_as_ever() -> None:
    command = [sys.executable, "-c", SCRIPT.replace("{error}", "ValueError").replace("60", "2")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")
