"""Seconds until a run is running again after SIGKILL of a part of its stack.

The figures are in docs/reliability.md. NANOCHAT_TRIALS is the number of kills of each part.
"""

import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable

import psutil
import pytest

from tests.support.campaigns import Campaign
from tests.support.infra.stack.live import LiveStack, wait_for

pytestmark = [pytest.mark.prefect, pytest.mark.timeout(7200)]

MAX_SECONDS = 120.0  # without those that `nanochat up` takes, which a busy machine multiplies


def attempt(live: LiveStack, name: str) -> int:
    """The process of the toy's latest attempt."""
    return int((live.home / f"{name}.pid").read_text() or 0)


def kill_server(live: LiveStack, name: str) -> None:
    assert live.server is not None
    os.kill(live.server, signal.SIGKILL)


def kill_all(live: LiveStack, name: str) -> None:
    for process in live.processes():
        process.kill()


# The supervisor and the stack are started again by the command, as systemd would.
KILLS: dict[str, Callable[[LiveStack, str], None]] = {
    "flow process": lambda live, name: os.kill(attempt(live, name), signal.SIGKILL),
    "worker": lambda live, name: os.kill(live.worker("cpu") or 0, signal.SIGKILL),
    "server": kill_server,
    "supervisor": lambda live, name: os.kill(live.supervisor, signal.SIGKILL),
    "whole stack": kill_all,
}


def seconds_to_run_again(live: LiveStack, part: str, name: str) -> tuple[float, float]:
    """Kill a part under a run; return after how long the run, or the server, is back.

    And how much of that `nanochat up` took.
    """
    run = live.start_toy(name)
    before, server = attempt(live, name), live.server
    KILLS[part](live, name)
    began = time.monotonic()
    if part in ("supervisor", "whole stack"):
        assert live.up().returncode == 0
    of_up = time.monotonic() - began
    if part == "server":
        wait_for(lambda: live.server != server and bool(live.state(run)), "the server")
        assert psutil.pid_exists(before)  # its run continues meanwhile
    else:
        wait_for(lambda: attempt(live, name) != before, f"another attempt of {name}")
    seconds = time.monotonic() - began
    live.finish_toy(name)
    live.wait_for_state(run, "Completed")
    found = live.ask(f"/flow_runs/{run}")
    assert found["run_count"] == (1 if part == "server" else 2)  # it was not resumed twice
    return seconds, of_up


def test_a_run_is_running_again_within_two_minutes_whatever_is_killed(
    live: LiveStack, campaign: Campaign
) -> None:
    seconds: dict[str, list[float]] = {part: [] for part in KILLS}
    longest = 0.0
    for number, part in itertools.product(range(campaign.trials(1)), KILLS):
        name = f"{part.replace(' ', '-')}-{number}"
        found, of_up = seconds_to_run_again(live, part, name)
        seconds[part].append(found)
        longest = max(longest, found - of_up)
        print(f"{part}: {found:.1f} s, {of_up:.1f} s of them `nanochat up`")
    for part, all_of in seconds.items():
        median = statistics.median(all_of)
        print(f"| {part} | {len(all_of)} | {median:.1f} s | {max(all_of):.1f} s |")
    campaign.found(f"running again after {longest:.0f} s at most")
    assert longest < MAX_SECONDS
