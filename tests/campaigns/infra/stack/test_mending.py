"""Whatever of a stack is killed or stopped comes back, and its runs go on. Takes minutes."""

import os
import signal

import psutil
import pytest

from tests.support.infra.stack.live import LiveStack, wait_for

pytestmark = [pytest.mark.prefect, pytest.mark.timeout(900)]


def pid_of(live: LiveStack, name: str) -> int:
    """The process of the toy's latest attempt."""
    return int((live.home / f"{name}.pid").read_text())


def finish_other_attempt(live: LiveStack, run: str, name: str, before: int) -> None:
    """Wait until the run goes on in another process; let it end, and see that it ended well."""
    wait_for(lambda: pid_of(live, name) != before, f"another attempt of {name}")
    live.finish_toy(name)
    live.wait_for_state(run, "Completed")
    assert live.ask(f"/flow_runs/{run}")["run_count"] == 2


def test_a_run_survives_a_killed_server_which_is_back_at_its_address(live: LiveStack) -> None:
    run = live.start_toy("outlives")
    before, server = (live.api_url, live.workers), live.server
    assert server is not None

    os.kill(server, signal.SIGKILL)
    live.finish_toy("outlives")

    live.wait_for_state(run, "Completed")
    wait_for(lambda: live.server not in (None, server), "another server")
    assert (live.api_url, live.workers) == before


def test_a_killed_worker_is_replaced_and_its_run_saves_and_resumes(live: LiveStack) -> None:
    run = live.start_toy("orphan")
    worker, pid = live.worker("cpu"), pid_of(live, "orphan")

    os.kill(worker, signal.SIGKILL)

    wait_for(lambda: not psutil.pid_exists(pid), "the end of the orphan", seconds=40)
    assert (live.home / "orphan.saved").exists()
    wait_for(lambda: live.worker("cpu") not in (None, worker), "another worker")
    finish_other_attempt(live, run, "orphan", pid)


def test_a_stopped_worker_is_replaced_and_its_run_resumes(live: LiveStack) -> None:
    run = live.start_toy("stopped")
    worker, pid = live.worker("cpu"), pid_of(live, "stopped")

    os.kill(worker, signal.SIGTERM)

    seconds = wait_for(lambda: live.state(run) == "AwaitingRetry", "its resume")
    assert seconds < 120  # it ends with its worker, and its heartbeat is missed after 90
    finish_other_attempt(live, run, "stopped", pid)


def test_the_workers_of_a_killed_supervisor_end_and_the_next_up_resumes(live: LiveStack) -> None:
    run = live.start_toy("kept")
    supervisor, server, pid = live.supervisor, live.server, pid_of(live, "kept")
    workers = filter(None, live.workers)

    os.kill(supervisor, signal.SIGKILL)

    wait_for(lambda: not any(map(psutil.pid_exists, [*workers, pid])), "their end", seconds=60)
    assert live.ask("/admin/version")  # the server is for others too
    assert live.up().returncode == 0
    assert live.server == server
    assert live.supervisor != supervisor
    finish_other_attempt(live, run, "kept", pid)


def test_down_has_runs_save_and_the_next_up_has_them_go_on(live: LiveStack) -> None:
    run = live.start_toy("interrupted")
    pid = pid_of(live, "interrupted")

    down = live.down()

    assert (down.returncode, down.stdout, down.stderr) == (0, "stopped\n", "")
    assert (live.home / "interrupted.saved").exists()
    assert live.processes() == []
    assert live.up().returncode == 0
    finish_other_attempt(live, run, "interrupted", pid)


def test_down_works_when_the_supervisor_was_killed(live: LiveStack) -> None:
    live.start_toy("left")

    os.kill(live.supervisor, signal.SIGKILL)

    assert live.down().returncode == 0
    wait_for(lambda: live.processes() == [], "the end of its workers and runs", seconds=60)
    assert live.nanochat("down").stdout == "no Prefect server was running\n"
