"""What a real server's pages show of stages and runs, asked for as the pages ask: over HTTP."""

import contextlib
import json
import logging
from typing import Any

import httpx
import pytest

from flows.artifacts.runs import new_run_id
from tests.integration.flows.orchestration.test_pipeline import run_toys
from tests.support.deployments.fixtures import api
from tests.support.deployments.prefect_api import PrefectApi
from tests.support.flows.pools import wait_until

__all__ = ["api", "run_toys"]

pytestmark = pytest.mark.prefect

TRAINING = """
from nanochat_core.runtime.progress import Progress


def run(job):
    saved = job.checkpoints / "saved"
    first = 5 if saved.exists() else 0
    progress = Progress(job.events)
    progress.start(10, step=first)
    for step in range(first + 1, 11):
        progress.step(step, loss=5.0 / step, tokens_per_second=1234.5)
        if step == 7 and (job.directory.parents[2] / "broken" / job.stage).exists():
            saved.touch()
            raise ValueError("the machine is on fire")
    (job.output / "value.txt").write_text("trained")
    return {"score": 0.5, "score_low": 0.25, "score_high": 0.75, "steps": 10}
"""


class Pages:
    """The API that the pages ask."""

    def __init__(self, api: PrefectApi) -> None:
        self._api = api

    def flow_runs(self, name: str) -> list[dict[str, Any]]:
        """All flow runs of this name, the newest first."""
        chosen = {"flow_runs": {"name": {"any_": [name]}}, "sort": "START_TIME_DESC"}
        return self._api.post("/flow_runs/filter", chosen)

    def task_run(self, flow_run: str, stage: str) -> dict[str, Any]:
        """A stage's task run in its last state, which the server learns of a moment later."""
        chosen = {"flow_runs": {"name": {"any_": [flow_run]}}}

        # The server stores a task run first, and then the state that belongs to it.
        def ended() -> dict[str, Any] | None:
            found = {run["name"]: run for run in self._api.post("/task_runs/filter", chosen)}
            run = found.get(stage)
            is_ended = run and run["state"] and run["state_type"] in ("COMPLETED", "FAILED")
            return run if is_ended else None

        return wait_until(ended)

    def artifacts(self, flow_run: str) -> list[dict[str, Any]]:
        """What the tab Artifacts of the first flow run of this name shows."""
        return self._artifacts("flow_run_id", self.flow_runs(flow_run)[-1])

    def stage_artifacts(self, task_run: dict[str, Any]) -> list[dict[str, Any]]:
        """What the tab Artifacts of a task run shows."""
        return self._artifacts("task_run_id", task_run)

    def _artifacts(self, field: str, run: dict[str, Any]) -> list[dict[str, Any]]:
        chosen = {"artifacts": {field: {"any_": [run["id"]]}}}
        return self._api.post("/artifacts/filter", chosen)

    def logs(self, flow_run: str, text: str) -> list[dict[str, Any]]:
        """The lines of a flow run once `text` is among them: they are sent in bundles."""
        run = self.flow_runs(flow_run)[-1]["id"]
        chosen = {"logs": {"flow_run_id": {"any_": [run]}}}

        def found() -> list[dict[str, Any]] | None:
            lines = self._api.post("/logs/filter", chosen)
            return lines if any(text in line["message"] for line in lines) else None

        return wait_until(found)


def by_key(artifacts: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The artifacts by key, each of which has one."""
    assert len({item["key"] for item in artifacts}) == len(artifacts)
    return {item["key"]: item for item in artifacts}


@pytest.fixture
def pages(api: PrefectApi) -> Pages:
    return Pages(api)


def test_a_run_that_fails_and_resumes_is_shown_from_its_curve_to_its_cause(toys, run_toys, pages):
    from infra.launch.torchrun import JobFailed

    data = toys.stage("data")
    training = toys.stage("training", data, source=TRAINING)
    toys.set_broken("training")
    first, second = (new_run_id("toy", "20261121t000000z") for _ in range(2))
    with pytest.raises(JobFailed):
        run_toys(toys, [data, training], run_id=first)
    check_failed(pages, first)

    toys.set_broken("training", False)
    outcome = run_toys(toys, [data, training], run_id=second)
    check_went_on(pages, second, outcome.stages["training"])


def check_failed(pages: Pages, name: str) -> None:
    shown = by_key(pages.artifacts(name))
    assert shown["toy-training-progress"]["data"] < 100
    assert "| data | built |" in shown["toy-artifacts"]["data"]  # what there is by now
    lines = pages.logs(name, "replay it with: python -P -m nanochat_core.worker")
    errors = [line["message"] for line in lines if line["level"] == logging.ERROR]
    assert any(text.startswith("training: failed: training failed on rank 0") for text in errors)
    for part in (
        'raise ValueError("the machine is on fire")',  # of the traceback in the rank's log
        "replay it with: python -P -m nanochat_core.worker /",
    ):
        assert any(part in text for text in errors)
    run = pages.task_run(name, "training")
    assert f"run:{name}" in run["tags"]
    assert any(tag.startswith("stage:training/") for tag in run["tags"])


def check_went_on(pages: Pages, name: str, built: Any) -> None:
    run = pages.task_run(name, "training")
    assert (run["state_type"], run["state_name"]) == ("COMPLETED", "Resumed")
    assert run["state"]["message"] == f"resumed at step 5/10; {built.uri}"
    assert {f"run:{name}", f"stage:{built.manifest.name}"} <= set(run["tags"])
    assert pages.task_run(name, "data")["state_name"] == "Cached"
    assert pages.flow_runs(name)[-1]["tags"] == [f"run:{name}"]

    of_run, shown = by_key(pages.artifacts(name)), by_key(pages.stage_artifacts(run))
    assert set(of_run) == {"toy-artifacts"}  # bars are removed; metrics are on the stages' pages
    assert set(shown) == {"toy-training-metrics", "toy-training-curve"}
    metrics = shown["toy-training-metrics"]
    assert metrics["description"] == "What training measured at its end."
    assert json.loads(metrics["data"]) == [  # text: the pages break on anything else
        {"metric": "score", "value": 0.5, "95 % interval": "0.25 to 0.75"},
        {"metric": "steps", "value": 10, "95 % interval": ""},
    ]
    curve = shown["toy-training-curve"]
    assert curve["type"] == "image"
    assert curve["data"].startswith("data:image/svg+xml,")
    page = of_run["toy-artifacts"]["data"]
    assert "| training | resumed at step 5/10 |" in page
    assert "| data | Cached |" in page
    pages.logs(name, "training: resumed at step 5/10")


def test_a_stage_is_shown_in_a_flow_run_that_has_no_tasks(toys, server, pages):
    from prefect import flow

    from flows.building.build import build
    from flows.orchestration.stage_page import StagePage, final_state

    training = toys.stage("training", source=TRAINING)

    run_id = new_run_id("toy", "20261121t000000z")

    @flow(name="one-toy", flow_run_name=run_id)
    def one_toy() -> Any:
        reporter = StagePage(training, run=run_id)
        context = toys.context(run_id)
        object.__setattr__(context, "watch", lambda stage, event: reporter.report(event))
        built = build(training, context, {}, force=False)
        reporter.close()
        return final_state(built)

    one_toy()
    [run] = pages.flow_runs(run_id)
    assert (run["state_type"], run["state_name"]) == ("COMPLETED", "Completed")
    shown = by_key(pages.artifacts(run_id))
    assert set(shown) == {"toy-training-metrics", "toy-training-curve"}
    assert shown["toy-training-curve"]["task_run_id"] is None
    one_toy()
    assert "Cached" in {run["state_name"] for run in pages.flow_runs(run_id)}


def test_after_a_retry_the_page_has_what_the_last_execution_showed(server, pages):
    from prefect import flow

    from flows.orchestration.stage_page import BackgroundWriter

    executions: list[str] = []

    @flow(name="scored", retries=1)
    def scored() -> None:
        executions.append(f"execution {len(executions) + 1}")
        with contextlib.closing(BackgroundWriter("scored")) as writer:
            writer.show("scores", "markdown", executions[-1], about="What each model scores.")
            writer.show("scores", "markdown", f"{executions[-1]}, all", about="The same.")
        if len(executions) == 1:
            raise ValueError("a fault after the scores")

    name = new_run_id("scored", "20261121t000000z")
    scored.with_options(flow_run_name=name)()
    assert executions == ["execution 1", "execution 2"]
    shown = by_key(pages.artifacts(name))
    assert shown["scored-scores"]["data"] == "execution 2, all"


def test_what_cannot_be_shown_costs_nothing_else_and_a_silent_server_is_left_alone(server, pages):
    from prefect import flow

    from flows.orchestration.stage_page import BackgroundWriter

    done: list[str] = []

    def refused(_: object) -> None:
        raise httpx.ConnectError("no server listens")

    def broken(_: object) -> None:
        raise KeyError("of the picture")

    @flow(name="couriers")
    def couriers() -> None:
        one, other = BackgroundWriter("one"), BackgroundWriter("other")
        one.send(broken)
        one.send(lambda _: done.append("after a mistake"))
        other.send(refused)
        other.send(lambda _: done.append("after silence"))
        one.show("page", "markdown", "text", about="about")
        one.show("page", "markdown", lambda: "other text", about="about")
        one.close()
        other.close()

    name = new_run_id("couriers", "20261121t000000z")
    couriers.with_options(flow_run_name=name)()
    assert done == ["after a mistake"]
    shown = [(item["key"], item["data"]) for item in pages.artifacts(name)]
    assert shown == [("one-page", "other text")]
    # In either order: two threads log, and each bundle of lines has what was logged by then.
    assert pages.logs(name, "not shown on Prefect's pages: ConnectError: no server listens")
    assert pages.logs(name, "not shown on Prefect's pages: KeyError: 'of the picture'")
