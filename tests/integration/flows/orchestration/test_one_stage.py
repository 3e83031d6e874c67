"""The flow that carries out an order, in the test's own process: how its run ends."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import Mock

import pytest

import flows.building.stage_request
import flows.orchestration.one_stage
from flows.building.build import look_up
from flows.building.stage_request import StageRequest, make_request
from infra.gangs.slurm import Slurm
from infra.prefect.server import Server
from nanochat_core.errors import StageError
from tests.support.flows.house import make_run

pytestmark = pytest.mark.prefect

# Killed while there is a file `fatal` in the home.
FRAGILE = """
import os
import signal
from nanochat_core.runtime.progress import Progress


def run(job):
    if (job.directory.parents[2] / "fatal").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    progress = Progress(job.events)
    progress.start(2)
    progress.step(1, loss=0.5)
    progress.step(2, loss=0.25)
    (job.output / "value.txt").write_text("made")
    return {"score": 0.5}
"""


@pytest.fixture
def asked(toys: Any, server: Server) -> StageRequest:
    """An order of a toy stage."""
    stage = toys.stage("fragile", compute="gpu", source=FRAGILE)
    identity = look_up(stage, toys.context(), {}, force=False).identity
    run = make_run("toy-1")
    return make_request(stage, toys.context(), run, {}, identity=identity)


@pytest.fixture
def carry_out(
    toys: Any, asked: StageRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[StageRequest], Any]:
    """Runs the flow with an order of this stage; gives the state that it ends in."""
    stage = toys.stage("fragile", compute="gpu", source=FRAGILE)

    def open_order(asked: StageRequest, *, watch: Any) -> Any:
        return stage, replace(toys.context(asked.run), watch=watch), {}

    monkeypatch.setattr(flows.building.stage_request, "open_request", open_order)
    monkeypatch.setattr(flows.orchestration.one_stage, "stage_of", lambda asked: stage)

    def run(asked: StageRequest) -> Any:
        parameters = json.loads(json.dumps(asdict(asked)))  # as they come from the server
        return flows.orchestration.one_stage.one_stage(parameters, return_state=True)

    return run


def test_an_order_is_carried_out_once_and_shown_on_the_page_of_its_flow_run(asked, carry_out, api):
    first, second = carry_out(asked), carry_out(asked)
    assert (first.name, second.name) == ("Completed", "Cached")
    assert first.message == second.message
    assert first.message.endswith(f"/fragile/{asked.fingerprint}")
    shown = api.artifacts(str(first.state_details.flow_run_id))
    assert {item["key"] for item in shown} == {"toy-1-fragile-metrics"}
    assert {item["task_run_id"] for item in shown} == {None}


def test_what_the_machine_did_is_a_crash_and_can_be_ordered_again(toys, asked, carry_out):
    (toys.home / "fatal").touch()
    state = carry_out(asked)
    assert state.is_crashed()
    assert "fragile ended without a result: killed by SIGKILL" in state.message
    assert "\nhint: its log is" in state.message
    assert "replay it with: python -P -m nanochat_core.worker" in state.message
    (toys.home / "fatal").unlink()
    assert carry_out(asked).is_completed()


def test_another_fingerprint_is_refused_in_a_line(asked, carry_out, caplog):
    state = carry_out(replace(asked, fingerprint="ab" * 32))
    assert state.is_failed()
    assert state.message.startswith("fragile/abababababab was requested, but this machine would")
    assert "Traceback" not in caplog.text


def test_a_worker_without_a_scheduler_refuses_a_request_for_several_machines(asked, carry_out):
    state = carry_out(replace(asked, nodes=2))
    assert state.is_failed()
    assert "is requested on 2 machines, this worker has one" in state.message
    assert "NANOCHAT_GANGS" in state.message


def test_a_worker_with_a_scheduler_asks_it_for_a_gang(asked, carry_out, monkeypatch):
    build_on_gang = Mock(side_effect=StageError("no row file"))
    monkeypatch.setattr(flows.orchestration.one_stage, "build_on_gang", build_on_gang)
    monkeypatch.setenv("NANOCHAT_GANGS", "slurm")
    state = carry_out(replace(asked, nodes=2))
    assert state.is_failed()
    assert state.message == "no row file"
    request, gangs = build_on_gang.call_args.args
    assert request == replace(asked, nodes=2)
    assert isinstance(gangs, Slurm)
