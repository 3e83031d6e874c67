"""Runs whose process is gone end on the pages of a real Prefect server too."""

from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from infra.prefect.flow_runs import end_task_runs, find_flow_runs, report_ended
from infra.prefect.server import Server, stop_server, write_record
from nanochat_core.runtime.process_start import this_process
from tests.support.flows.pools import client

pytestmark = pytest.mark.prefect


def begin(name: str, *tags: str) -> tuple[UUID, dict[str, UUID]]:
    """A flow run that is running, with a running and a finished task run and their bars."""
    from prefect import flow, task
    from prefect.client.schemas.actions import ArtifactCreate
    from prefect.states import Completed, Running

    @flow(name="begun")
    def body() -> None: ...

    @task
    def stage() -> None: ...

    found: dict[str, UUID] = {}
    with client() as asking:
        run = asking.create_flow_run(body, name=name, state=Running(), tags=tags)
        for label, state, percent in (("live", Running(), 12.5), ("made", Completed(), 100.0)):
            task_run = asking.create_task_run(
                stage, flow_run_id=run.id, dynamic_key=label, name=label, state=state
            )
            found[label] = task_run.id
            bar = ArtifactCreate(
                key=f"{name}-{label}",
                type="progress",
                data=percent,
                flow_run_id=run.id,
                task_run_id=task_run.id,
            )
            asking.create_artifact(bar)
    return run.id, found


def shown(run: UUID, tasks: dict[str, UUID]) -> tuple[str, dict[str, str], list[str]]:
    """The states of a flow run and its task runs, and the keys of its progress bars."""
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    chosen: Any = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
    with client() as asking:
        states = {label: asking.read_task_run(task).state_name for label, task in tasks.items()}
        bars = asking.read_artifacts(artifact_filter=chosen)
        name = asking.read_flow_run(run).state_name
        return str(name), states, sorted(str(bar.key).rpartition("-")[2] for bar in bars)


def test_the_runs_of_a_process_that_died_are_crashed_and_leave_no_unfinished_bar(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", server.api_url)
    name = f"dead-{uuid4().hex}"
    run, tasks = begin(name)
    request, wanted = begin(f"sft-{uuid4().hex}", f"run:{name}", "request:1")
    other, others = begin(f"other-{uuid4().hex}")
    for _ in range(2):  # idempotent
        assert report_ended(tmp_path, find_flow_runs(tmp_path, name), "it died")
        crashed = {"live": "Crashed", "made": "Completed"}
        assert shown(run, tasks) == ("Crashed", crashed, ["made"])
    running = {"live": "Running", "made": "Completed"}
    for left in (shown(request, wanted), shown(other, others)):
        assert left == ("Running", running, ["live", "made"])


def test_what_an_earlier_start_left_ends_and_the_run_itself_continues(server: Server) -> None:
    run, tasks = begin(f"resumed-{uuid4().hex}")
    end_task_runs(server.api_url, str(run), "it died")
    crashed = {"live": "Crashed", "made": "Completed"}
    assert shown(run, tasks) == ("Running", crashed, ["made"])
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
