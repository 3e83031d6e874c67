"""Whatever of a stack is killed or stopped comes back, and its runs continue within two minutes.

The figures are in docs/reliability.md. NANOCHAT_TRIALS is the number of kills of each part.
"""

import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.support.campaigns import Campaign
from tests.support.infra.ports import quiet_port
from tests.support.infra.stack.live import LiveStack, wait_for

pytestmark = [pytest.mark.prefect, pytest.mark.timeout(7200)]

MAX_SECONDS = 120.0  # without those that `nanochat up` takes, which a busy machine multiplies


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """A stack that is up, one for all tests."""
    directory = tmp_path_factory.mktemp("stack")
    stack = LiveStack(directory / "home")
    try:
        done = stack.up("--port", str(quiet_port()))
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        stack.deploy_toy()
        yield stack
    finally:
        stack.down()
    assert stack.processes() == []


def pid_of(live: LiveStack, name: str) -> int:
    """Return the process of the toy's latest attempt."""
    return int((live.home / f"{name}.pid").read_text())


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


# The supervisor and the stack are started again by the command, as systemd would.
KILLS: dict[str, Callable[[LiveStack, int], object]] = {
    "flow process": lambda live, pid: kill(pid),
    "worker": lambda live, pid: kill(live.worker("cpu")),
    "server": lambda live, pid: kill(live.server),
    "supervisor": lambda live, pid: kill(live.supervisor),
    "whole stack": lambda live, pid: [process.kill() for process in live.processes()],
}


def seconds_to_run_again(live: LiveStack, part: str, name: str) -> tuple[float, float]:
    """Kill a part under a run; return after how long the run, or the server, is back.

    And how much of that `nanochat up` took.
    """
    run = live.start_toy(name)
    pid, server, workers = pid_of(live, name), live.server, live.workers
    address = live.api_url
    KILLS[part](live, pid)
    began = time.monotonic()
    if part in ("supervisor", "whole stack"):
        assert live.up().returncode == 0
    of_up = time.monotonic() - began
    if part == "server":
        wait_for(lambda: live.server != server and bool(live.state(run)), "the server")
        assert psutil.pid_exists(pid)  # its run continues meanwhile
        assert (live.api_url, live.workers) == (address, workers)
    else:
        wait_for(lambda: pid_of(live, name) != pid, f"another attempt of {name}")
    seconds = time.monotonic() - began
    if part == "worker":
        assert (live.home / f"{name}.saved").exists()  # the run ends with its worker
    if part in ("worker", "supervisor"):
        assert not psutil.pid_exists(pid)
    if part == "supervisor":
        assert not any(map(psutil.pid_exists, filter(None, workers)))
        assert live.server == server  # it is for others too
    finish(live, run, name, attempts=1 if part == "server" else 2)  # not resumed twice
    return seconds, of_up


def finish(live: LiveStack, run: str, name: str, *, attempts: int) -> None:
    """Let a run end, and see that it ended well, in so many attempts."""
    live.finish_toy(name)
    live.wait_for_state(run, "Completed")
    assert live.ask(f"/flow_runs/{run}")["run_count"] == attempts


def test_a_run_is_running_again_within_two_minutes_whatever_is_killed(
    live: LiveStack, campaign: Campaign
) -> None:
    seconds: dict[str, list[float]] = {part: [] for part in KILLS}
    longest = 0.0
    for number, part in itertools.product(range(campaign.trials(1)), KILLS):
        found, of_up = seconds_to_run_again(live, part, f"{part.replace(' ', '-')}-{number}")
        seconds[part].append(found)
        longest = max(longest, found - of_up)
        print(f"{part}: {found:.1f} s, {of_up:.1f} s of them `nanochat up`")
    for part, each in seconds.items():
        print(f"| {part} | {len(each)} | {statistics.median(each):.1f} s | {max(each):.1f} s |")
    campaign.found(f"running again after {longest:.0f} s at most")
    assert longest < MAX_SECONDS


def test_a_stopped_worker_is_replaced_and_its_run_resumes(live: LiveStack) -> None:
    run = live.start_toy("stopped")
    worker, pid = live.worker("cpu"), pid_of(live, "stopped")
    os.kill(worker or 0, signal.SIGTERM)
    seconds = wait_for(lambda: live.state(run) == "AwaitingRetry", "its resume")
    assert seconds < 120  # it ends with its worker, and its heartbeat is missed after 90
    wait_for(lambda: pid_of(live, "stopped") != pid, "another attempt")
    finish(live, run, "stopped", attempts=2)


def test_down_has_runs_save_and_the_next_up_resumes_them(live: LiveStack) -> None:
    run = live.start_toy("interrupted")
    pid = pid_of(live, "interrupted")
    down = live.down()
    assert (down.returncode, down.stdout, down.stderr) == (0, "stopped\n", "")
    assert (live.home / "interrupted.saved").exists()
    assert live.processes() == []
    assert live.up().returncode == 0
    wait_for(lambda: pid_of(live, "interrupted") != pid, "another attempt")
    finish(live, run, "interrupted", attempts=2)


def test_down_works_when_the_supervisor_was_killed(live: LiveStack) -> None:
    live.start_toy("left")
    kill(live.supervisor)
    assert live.down().returncode == 0
    wait_for(lambda: live.processes() == [], "the end of its workers and runs", seconds=60)
    assert live.nanochat("down").stdout == "no Prefect server was running\n"
