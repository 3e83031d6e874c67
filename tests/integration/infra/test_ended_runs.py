"""Runs whose process is gone end on the pages of a real Prefect server too."""

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from infra.prefect.flow_runs import end_task_runs, find_flow_runs, report_ended
from infra.prefect.server import Server, stop_server, write_record
from nanochat_core.runtime.process_start import this_process
from tests.support.deployments.prefect_api import PrefectApi

pytestmark = pytest.mark.prefect


def begin(api: PrefectApi, name: str, *tags: str) -> str:
    """Make a flow run that is running, with a running and a finished task run and their bars."""
    body = {"flow_id": api.post("/flows/", {"name": "begun"})["id"], "name": name, "tags": tags}
    run = api.post("/flow_runs/", {**body, "state": {"type": "RUNNING"}})["id"]
    of_run = {"flow_run_id": run}
    for label, state, percent in (("live", "RUNNING", 12.5), ("made", "COMPLETED", 100.0)):
        keys = {"name": label, "dynamic_key": label, "task_key": "stage"}
        task = api.post("/task_runs/", {**of_run, **keys, "state": {"type": state}})["id"]
        bar = {"key": f"{name}-{label}", "type": "progress", "data": percent, "task_run_id": task}
        api.post("/artifacts/", {**of_run, **bar})
    return run


def shown(api: PrefectApi, run: str) -> tuple[str, dict[str, str], list[str]]:
    """Return the states of a flow run and its task runs, and the keys of its progress bars."""
    states = {task["name"]: task["state_name"] for task in api.task_runs(run)}
    bars = sorted(bar["key"].rpartition("-")[2] for bar in api.artifacts(run))
    return api.run(run)["state_name"], states, bars


def test_the_runs_of_a_process_that_died_are_crashed_and_leave_no_unfinished_bar(
    server: Server, api: PrefectApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", server.api_url)
    name = f"dead-{uuid4().hex}"
    run, request = begin(api, name), begin(api, f"sft-{uuid4().hex}", f"run:{name}", "request:1")
    other = begin(api, f"other-{uuid4().hex}")
    for _ in range(2):  # idempotent
        assert report_ended(tmp_path, find_flow_runs(tmp_path, name), "it died")
        assert shown(api, run) == ("Crashed", {"live": "Crashed", "made": "Completed"}, ["made"])
    running = {"live": "Running", "made": "Completed"}
    for left in (request, other):
        assert shown(api, left) == ("Running", running, ["live", "made"])
    end_task_runs(server.api_url, str(uuid4()), "it died")  # it was deleted


def test_a_server_that_is_away_is_asked_again_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def is_reported(home: Path) -> bool:
        return report_ended(home, find_flow_runs(home, "tiny-1"), "it died")

    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert not is_reported(tmp_path)  # a shared server
    monkeypatch.delenv("PREFECT_API_URL")
    assert is_reported(tmp_path)  # Prefect was never started
    killed, stopped = tmp_path / "killed", tmp_path / "stopped"
    for home in (killed, stopped):
        start = this_process()
        write_record(home, Server(port=9, pid=start.pid, start="another"))
        assert not is_reported(home)
    stop_server(stopped)
    assert not is_reported(stopped)  # its database is in the home, or Postgres
