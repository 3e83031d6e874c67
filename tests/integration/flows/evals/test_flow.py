"""Models evaluated again on a real Prefect server: alerts, schedules, and what costs nothing."""

import json
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from flows.evals.suite import EvalRequest, open_suite
from infra.prefect.server import Server
from infra.storage.base import Store
from nanochat_core.errors import StageError
from tests.support.deployments.fixtures import posted
from tests.support.flows.pools import SECONDS, client, wait_until
from tests.support.flows.shelf import make_manifest, put_artifact, put_run
from tests.support.flows.terminal import Terminal

__all__ = ["posted"]

pytestmark = pytest.mark.prefect

MODEL = """
def run(job):
    (job.output / "value.txt").write_text("{value}")
    return {{}}
"""
EVALUATE = """
def run(job):
    value = float((job.inputs["sft"] / "value.txt").read_text())
    (job.output / "value.txt").write_text(str(value))
    return {"chatcore": value, "chatcore_low": value - 0.01, "chatcore_high": value + 0.01}
"""


@pytest.fixture
def assess(toys: Any, server: Server) -> Callable[..., Any]:
    """Return a function that evaluates a toy model of some worth, as the flow does."""
    from prefect import flow

    from flows.artifacts.runs import new_run_id
    from flows.evals.flow import assess_run
    from flows.orchestration.pipeline import run_pipeline
    from tests.integration.flows.orchestration.test_pipeline import make_run

    nights = iter(range(100))

    def now(ask: Callable[[], Any]) -> Any:
        return ask()

    def night_of(worth: float, *, name: str = "main", **rule: Any) -> Any:
        model = toys.stage("sft", source=MODEL.format(value=worth))
        stages = [model, toys.stage("chat_eval_sft", model, source=EVALUATE)]
        run_id = new_run_id(f"eval-{name}", f"20261121t0300{next(nights):02d}z")
        record = replace(make_run(run_id), name=f"eval-{name}")

        @flow(name="nanochat-eval", flow_run_name=run_id)
        def evaluation() -> Any:
            context = toys.context(run_id)
            found = run_pipeline(stages, context, record)
            request = EvalRequest(model=f"sft@{name}", **rule)
            return assess_run(stages[-1].name, found, request, store=context.store, wait=now)

        return evaluation()

    return night_of


def events(name: str, model: str, count: int, *, seconds: float = SECONDS) -> list[dict[str, Any]]:
    """Events of a name about a model, oldest first, once there are so many; or what there is."""
    wanted = {
        "event": {"name": [name]},
        "resource": {"id": [f"nanochat.model.{model}"]},
        "order": "ASC",
    }
    deadline = time.monotonic() + seconds
    with client() as asking:
        while True:  # they are sent in the background
            found = asking.request("POST", "/events/filter", json={"filter": wanted})
            found = found.json()["events"]
            if len(found) >= count or time.monotonic() > deadline:
                return found
            time.sleep(0.1)


def raise_(text: str) -> Any:
    raise StageError(text)


def test_an_unchanged_model_starts_no_job_and_a_worse_one_raises_the_alert(assess, posted):
    from deployments.alerts import EVAL_REGRESSED, alerts, ensure_automation
    from tests.integration.flows.orchestration.test_pipeline import artifacts

    url, bodies = posted
    with client() as asking:
        [old], [new] = (
            [a for a in alerts(where, pools=[]) if a.name == EVAL_REGRESSED]
            for where in (f"{url}/old", url)
        )
        assert ensure_automation(asking, old)
        assert not ensure_automation(asking, new)  # another address is not another automation
        assert len(asking.read_automations_by_name(EVAL_REGRESSED)) == 1

    first, again, worse = assess(0.8), assess(0.8), assess(0.5)
    allowed = assess(0.4, drop=0.2)

    nights = (first, again, worse, allowed)
    assert [made.cached for made, _ in nights[:3]] == [False, True, False]
    assert again[0].manifest == first[0].manifest
    regressed = [verdict.regressed for _, verdict in nights]
    assert regressed == [False, False, True, False]
    completed = events("nanochat.eval.completed", "sft-main", 4)
    labels = [event["resource"]["nanochat.regressed"] for event in completed]
    assert labels == [str(each).lower() for each in regressed]
    [alert] = events("nanochat.eval.regressed", "sft-main", 1)
    labels, payload = alert["resource"], alert["payload"]
    assert (labels["nanochat.model"], labels["nanochat.metric"]) == ("sft@main", "chatcore")
    assert payload["score"] == {"value": 0.5, "low": 0.49, "high": 0.51}
    assert payload["baseline"]["value"] == 0.8
    assert payload["baseline_run"].startswith("eval-main-20261121t030001z-")
    assert not payload["inside_interval"]
    one, third, fourth = ("0.8 (0.79 to 0.81)", "0.5 (0.49 to 0.51)", "0.4 (0.39 to 0.41)")
    last, table = artifacts("eval-main-chat-eval-sft")[:2]
    assert [row["chatcore"] for row in json.loads(last.data)] == [fourth, third, one, one]
    assert [row["chatcore"] for row in json.loads(table.data)] == [third, one, one]
    assert "worse by more than 0.02" in table.description

    [text] = wait_until(lambda: [b["text"] for _, b in bodies if "sft@main" in b["text"]])
    assert text.startswith(
        "sft@main got worse: chatcore 0.5 (0.49 to 0.51), -0.3 (-0.3141 to -0.2859) against 0.8"
    )


@pytest.fixture
def prefect_terminal(
    server: Server, terminal: Terminal, store: Store, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Terminal]:
    """The command line with the shared server, and a store with a model called main."""
    made = [put_artifact(store, make_manifest(stage)) for stage in ("task_data", "sft")]
    put_run(store, "main-1", *made, name="main")
    monkeypatch.setenv("PREFECT_API_URL", server.api_url)
    terminal.run("evals", "--schedule", "main", "--remove")  # one that other tests registered
    yield terminal
    terminal.run("evals", "--schedule", "main", "--remove")


def test_a_schedule_given_twice_is_one_and_is_changed(prefect_terminal, store, server, transcript):
    transcript.replace(server.api_url, "API")
    terminal = prefect_terminal
    changed = "--cron '30 4 * * *' --timezone Europe/Berlin --pause --metric spelling --drop 0.1"
    for words in ("", "--schedule main", "", f"--schedule main {changed}", ""):
        terminal.shows("evals", *shlex.split(words))
    [found] = terminal.read("evals")
    assert (found["cron"], found["timezone"]) == ("30 4 * * *", "Europe/Berlin")
    with client() as asking:
        parameters = asking.read_deployment_by_name("nanochat-eval/main").parameters
    assert (parameters["drop"], parameters["metric"]) == (0.1, "spelling")
    assert parameters["store"] == store.url
    assert parameters["pool"] == "none"  # or `nanochat up --register` would add the default of main
    for _ in range(2):
        terminal.shows("evals --schedule main --remove")
    assert terminal.read("evals") == []


def test_the_worker_of_a_schedule_is_of_the_home_whose_server_has_it(
    prefect_terminal, server, store, monkeypatch, tmp_path
):
    def connect(home: Path, say: object) -> str:
        monkeypatch.setenv("PREFECT_API_URL", server.api_url)
        return server.api_url

    monkeypatch.delenv("PREFECT_API_URL")
    monkeypatch.setattr("flows.cli.artifacts.evals.connect", connect)
    home = tmp_path / "other home"
    place = ("--home", str(home), "--store", store.url)
    lines = prefect_terminal.said("evals", "--schedule", "main", *place)
    assert lines[2] == f"worker  nanochat up --pool cpu --home '{home}'"


def test_a_mistake_is_one_line_and_a_hint(prefect_terminal):
    for words in (
        *("--schedule sft@nowhere", "--schedule main --cron nightly", "main --cron hourly"),
        *("--schedule main --timezone Mars", "--schedule main --metric core"),
        "main --set sft.num_epochs=2",
    ):
        prefect_terminal.refuses(f"evals {words}")
    prefect_terminal.refuses("evals --schedule main --drop -1", code=2)


def test_a_schedule_creates_runs(prefect_terminal):
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId

    prefect_terminal.said("evals", "--schedule", "main", "--cron", "* * * * *")
    with client() as asking:
        deployment = asking.read_deployment_by_name("nanochat-eval/main")
        assert deployment.work_pool_name == "cpu"
        assert deployment.entrypoint == "flows.evals.flow.nanochat_eval"
        of_it = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment.id]))
        runs = wait_until(lambda: asking.read_flow_runs(flow_run_filter=of_it))
        assert all(run.auto_scheduled and run.parameters["model"] == "main" for run in runs)

        # Prefect deletes the runs too, but for those that its scheduler is about to insert.
        prefect_terminal.said("evals", "--schedule", "main", "--remove")
        assert deployment.id not in [each.id for each in asking.read_deployments()]


def test_a_parameter_that_cannot_be_fails_the_run_and_does_not_crash_it(server, store):
    from flows.evals.flow import nanochat_eval

    state: Any = nanochat_eval(model="sft@a b", store=store.url, return_state=True)
    assert state.is_failed()
    assert "'a b' cannot be the name of a run or a tag" in state.message


def test_a_command_gives_the_flow_the_model_that_it_has_opened(
    server, store, tmp_path, monkeypatch
):
    from flows.evals import flow
    from flows.orchestration.caller import LocalRun, call_flow, running_locally

    put_run(store, "main-1", put_artifact(store, make_manifest("sft")), name="main")
    request = EvalRequest(model="sft@main", store=store.url)
    opened = open_suite(request, store, warn=print)
    monkeypatch.setattr(flow, "run", lambda request, **options: raise_(request.use[0]))
    monkeypatch.setattr(flow, "open_suite", lambda *_, **options: raise_("it was opened again"))
    caller = LocalRun(home=tmp_path, watch=lambda *_: None, planned=opened)
    with running_locally(caller):
        with pytest.raises(StageError, match=opened.model.ref.prefix):
            call_flow(flow.nanochat_eval, **asdict(request))
        with pytest.raises(StageError, match="opened again"):
            call_flow(flow.nanochat_eval, **asdict(replace(request, model="main")))
