"""What commands say of a run, and record of its end, by what a Prefect server knows."""

import contextlib
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts.runs import find_run, write_run
from flows.cli.app import main
from flows.leases import run_lock
from flows.plan.dead_runs import settle
from infra.storage.base import Store
from tests.support.flows.fixtures import nothing
from tests.support.flows.prefect_api import Api
from tests.support.flows.shelf import make_manifest, put_artifact, put_run

pytestmark = pytest.mark.usefixtures("api_url")


def test_status_says_that_a_run_waits_for_a_worker(terminal, store):
    put_run(store, "tiny-1", status="running")
    Api.live = [
        {"name": "tiny-1", "state_type": "RUNNING", "state_name": "Running"},
        {
            "name": "pretrain/1a2b3c4d5e6f",
            "state_type": "SCHEDULED",
            "state_name": "Late",
            "work_pool_name": "gpu",
            "state": {"timestamp": (datetime.now(UTC) - timedelta(seconds=125)).isoformat()},
        },
        {"name": "sft/1a2b3c4d5e6f", "state_type": "COMPLETED", "state_name": "Cached"},
    ]
    lines = terminal.said("status", "tiny")
    assert lines[-2] == "the run is running"
    assert lines[-1].startswith("pretrain: waiting for a free `gpu` worker (2 min")
    Api.live = []
    assert "resume with" in terminal.said("status", "tiny")[-1]


def test_status_says_that_a_submitted_run_waits_for_its_first_worker(terminal):
    run = terminal.said("run", "tiny", "--submit")[0].split()[1]
    assert "there is no run" in terminal.fails("status", run)[0]  # the server has none either
    Api.live = [
        {"name": run, "state_type": "SCHEDULED", "state_name": "Late", "work_pool_name": "cpu"}
    ]
    assert terminal.said("status", run) == [
        f"run {run}: not started by a worker",
        "the run: waiting for a free `cpu` worker",
    ]
    assert terminal.read("status", run) == []


def crashed(run: str, *, seconds_ago: float, tags: tuple[str, ...] = ("auto-resume",)) -> Any:
    """A flow run whose process was killed, as Prefect shows it."""
    when = datetime.fromtimestamp(time.time() - seconds_ago, UTC).isoformat()
    return {
        "id": "f-1",
        "name": run,
        "tags": [*tags, f"run:{run}"],
        "state_type": "CRASHED",
        "state_name": "Crashed",
        "state": {"timestamp": when},
    }


@pytest.mark.parametrize("status", ["running", "interrupted"])
def test_no_second_run_is_offered_while_the_first_is_about_to_be_resumed(terminal, store, status):
    put_run(store, "tiny-1", status=status)
    for seconds, ago in ((9, "just now"), (125, "2 min ago"), (86500, "24 h ago")):
        Api.live = [crashed("tiny-1", seconds_ago=seconds)]
        lines = terminal.said("status", "tiny")
        assert lines[0] == f"run tiny-1: {status}"
        assert lines[-1] == f"the run crashed {ago}; `nanochat up` resumes it"
    Api.live = [Api.live[0] | {"state_type": "SCHEDULED", "state_name": "AwaitingRetry"}]
    assert terminal.said("status", "tiny")[-1].startswith("the run: waiting for a free worker (")


def test_a_run_that_crashed_and_is_not_resumed_is_recorded_as_ended(terminal, store):
    put_run(store, "tiny-1", status="running", ended=None)
    Api.live = [crashed("tiny-1", seconds_ago=9, tags=())]
    assert terminal.said("status")[0].split()[:2] == ["tiny-1", "interrupted"]
    lines = terminal.said("status", "tiny")
    assert lines[0] == "run tiny-1: interrupted"
    assert lines[-1].endswith("resume with: nanochat run tiny")
    assert Api.set_states == []  # it is Crashed already


def test_a_killed_command_is_shown_as_crashed_by_prefect_and_its_requests_are_left_alone(
    terminal, store, tmp_path
):
    home, running = tmp_path / "home", {"state_type": "RUNNING", "state_name": "Running"}
    put_run(store, "tiny-1", status="running", ended=None)
    with pytest.raises(KeyboardInterrupt), run_lock.hold(home, "tiny-1", store=store.url):
        raise KeyboardInterrupt
    Api.live = [
        {"id": "f-1", "name": "tiny-1", "tags": ["run:tiny-1"], **running},
        {"id": "f-2", "name": "sft/1a2b", "tags": ["run:tiny-1", "request:7"], **running},
    ]
    Api.faults = [("/api/flow_runs/f-1", 503)]  # it cannot answer at once
    terminal.said("status")
    assert list((home / "runs").iterdir()) != []
    Api.faults = []
    assert terminal.said("status", "tiny")[-1] == "sft is running"
    assert Api.set_states == [("/api/flow_runs/f-1/set_state", "CRASHED")]
    assert list((home / "runs").iterdir()) == []


@pytest.mark.parametrize("shown", ["RUNNING", "FAILED"])
def test_a_finished_run_is_completed_also_if_its_server_comes_back_late(
    terminal, store, tmp_path, shown
):
    home = tmp_path / "home"
    put_run(store, "tiny-1", status="finished")
    for run in ("tiny-1", "tiny-2"):
        with run_lock.hold(home, run, store=store.url, unreported=[run_lock.FINISHED]):
            pass
    # Prefect's engine makes it Failed if the server answers when Completed could not be reported.
    Api.live = [{"id": "f-1", "name": "tiny-1", "state_type": shown, "state_name": shown.title()}]
    terminal.said("status")
    assert Api.set_states == [("/api/flow_runs/f-1/set_state", "COMPLETED")]
    assert list((home / "runs").iterdir()) == []


@pytest.mark.parametrize("status", ["finished", "failed", "interrupted"])
def test_a_run_that_ends_while_it_is_looked_at_keeps_what_it_recorded(store, tmp_path, status):
    read = put_run(store, "tiny-1", status="running", ended=None)
    ended = replace(read, status=status, ended="2026-11-21T07:00:00Z", stages={"sft": "ab" * 32})
    write_run(store, ended)
    Api.live = [{"id": "f-1", "name": "tiny-1", "state_type": "COMPLETED", "state_name": "Done"}]
    assert settle(store, tmp_path / "home", read) == ended
    assert find_run(store, "tiny-1") == ended


def test_following_ends_when_prefect_knows_that_the_run_is_not_resumed(store, polls, monkeypatch):
    monkeypatch.setattr("flows.cli.train.logs._SECONDS_BETWEEN_CHECKS", 0.0)
    shards = put_artifact(store, make_manifest("shards"))
    put_run(store, "tiny-1", shards, status="running", ended=None)
    state = crashed("tiny-1", seconds_ago=9, tags=())
    Api.live = [state | {"state_type": "RUNNING", "state_name": "Running"}]

    polls(nothing, lambda: setattr(Api, "live", [state]), nothing, nothing)
    assert main(["status", "tiny", "-f"]) == 1
    assert find_run(store, "tiny-1").status == "interrupted"


def leave_locks(store: Store, home: Path, *runs: str) -> None:
    """Leave these runs as commands that failed do while Prefect cannot be asked."""
    for run in runs:
        put_run(store, run, status="failed")
        with contextlib.suppress(KeyboardInterrupt), run_lock.hold(home, run, store=store.url):
            raise KeyboardInterrupt


@pytest.mark.parametrize("words", [["ls"], ["status"], ["status", "tiny-1", "-n", "9"]])
@pytest.mark.parametrize("fault", [None, 503, 200])
def test_a_server_that_does_not_answer_is_asked_once_a_command(store, tmp_path, words, fault):
    home = tmp_path / "home"
    leave_locks(store, home, "tiny-2", "tiny-3", "tiny-4")
    for run in ("tiny-1", "tiny-5"):
        put_run(store, run, status="running", ended=None)
    Api.faults = [("/api/csrf-token", fault)] * 9
    assert main(words) == 0
    assert len(Api.faults) == 8
    assert len(list((home / "runs").iterdir())) == 3


@pytest.mark.parametrize("auth", ["secret", ":", "nanochat:"])
@pytest.mark.parametrize("words", [["ls"], ["status"], ["status", "tiny-1", "-n", "9"]])
def test_a_malformed_password_ends_no_command_that_only_looks(
    store, tmp_path, monkeypatch, words, auth
):
    leave_locks(store, tmp_path / "home", "tiny-2")
    put_run(store, "tiny-1", status="running", ended=None)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", auth)
    assert main(words) == 0
