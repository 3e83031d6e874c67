"""What a real server's pages show of stages and runs, asked for as the pages ask: over HTTP."""

import contextlib
import json
import logging
from typing import Any

import httpx
import pytest
from prefect import flow

from flows.artifacts.runs import new_run_id
from flows.orchestration.stage_page import BackgroundWriter
from infra.launch.torchrun import JobFailed
from tests.support.deployments.prefect_api import FINAL, PrefectApi
from tests.support.flows.pools import wait_until

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


def run_of(api: PrefectApi, name: str) -> dict[str, Any]:
    """Return the first flow run of this name."""
    return api.runs(flow_runs={"name": {"any_": [name]}})[-1]


def ended_task(api: PrefectApi, run: str, stage: str) -> dict[str, Any]:
    """Return a stage's task run in its last state, which the server learns of a moment later."""

    # The server stores a task run first, and then the state that belongs to it.
    def ended() -> dict[str, Any] | None:
        found = {each["name"]: each for each in api.task_runs(run)}.get(stage)
        return found if found and found["state"] and found["state_type"] in FINAL else None

    return wait_until(ended)


def lines_of(api: PrefectApi, run: str, text: str) -> list[dict[str, Any]]:
    """Return the lines of a flow run once `text` is among them: they are sent in bundles."""

    def found() -> list[dict[str, Any]] | None:
        lines = api.logs(run)
        return lines if any(text in line["message"] for line in lines) else None

    return wait_until(found)


def by_key(artifacts: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The artifacts by key, each of which has one."""
    assert len({item["key"] for item in artifacts}) == len(artifacts)
    return {item["key"]: item for item in artifacts}


def test_a_run_that_fails_and_resumes_is_shown_from_its_curve_to_its_cause(toys, run_toys, api):
    data = toys.stage("data")
    training = toys.stage("pretrain", data, source=TRAINING)
    toys.set_broken("pretrain")
    first, second = (new_run_id("toy", "20261121t000000z") for _ in range(2))
    with pytest.raises(JobFailed):
        run_toys(toys, [data, training], run_id=first)
    check_failed(api, first)

    toys.set_broken("pretrain", False)
    outcome = run_toys(toys, [data, training], run_id=second)
    check_went_on(api, second, outcome.stages["pretrain"])


def check_failed(api: PrefectApi, name: str) -> None:
    run = run_of(api, name)["id"]
    shown = by_key(api.artifacts(run))
    assert shown["toy-pretrain-progress"]["data"] < 100
    assert "| data | built |" in shown["toy-artifacts"]["data"]  # what there is by now
    lines = lines_of(api, run, "replay it with: python -P -m nanochat_core.worker")
    errors = [line["message"] for line in lines if line["level"] == logging.ERROR]
    assert any(text.startswith("pretrain: failed: pretrain failed on rank 0") for text in errors)
    for part in (
        'raise ValueError("the machine is on fire")',  # of the traceback in the rank's log
        "replay it with: python -P -m nanochat_core.worker /",
    ):
        assert any(part in text for text in errors)
    tags = ended_task(api, run, "pretrain")["tags"]
    assert f"run:{name}" in tags
    assert any(tag.startswith("stage:pretrain/") for tag in tags)


def check_went_on(api: PrefectApi, name: str, built: Any) -> None:
    run = run_of(api, name)
    task = ended_task(api, run["id"], "pretrain")
    assert (task["state_type"], task["state_name"]) == ("COMPLETED", "Resumed")
    assert task["state"]["message"] == f"resumed at step 5/10; {built.uri}"
    assert {f"run:{name}", f"stage:{built.manifest.name}"} <= set(task["tags"])
    assert ended_task(api, run["id"], "data")["state_name"] == "Cached"
    assert run["tags"] == [f"run:{name}"]

    of_run = by_key(api.artifacts(run["id"]))
    of_task = {"artifacts": {"task_run_id": {"any_": [task["id"]]}}}
    shown = by_key(api.post("artifacts/filter", of_task))
    assert set(of_run) == {"toy-artifacts"}  # bars are removed; metrics are on the stages' pages
    assert set(shown) == {"toy-pretrain-metrics", "toy-pretrain-curve"}
    metrics = shown["toy-pretrain-metrics"]
    assert metrics["description"] == "What pretrain measured at its end."
    assert json.loads(metrics["data"]) == [  # text: the pages break on anything else
        {"metric": "score", "value": 0.5, "95 % interval": "0.25 to 0.75"},
        {"metric": "steps", "value": 10, "95 % interval": ""},
    ]
    curve = shown["toy-pretrain-curve"]
    assert curve["type"] == "image"
    assert curve["data"].startswith("data:image/svg+xml,")
    page = of_run["toy-artifacts"]["data"]
    assert "| pretrain | resumed at step 5/10 |" in page
    assert "| data | Cached |" in page
    lines_of(api, run["id"], "pretrain: resumed at step 5/10")


def test_after_a_retry_the_page_has_what_the_last_execution_showed(server, api):
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
    shown = by_key(api.artifacts(run_of(api, name)["id"]))
    assert shown["scored-scores"]["data"] == "execution 2, all"


def test_what_cannot_be_shown_costs_nothing_else_and_a_silent_server_is_left_alone(server, api):
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
    run = run_of(api, name)["id"]
    shown = [(item["key"], item["data"]) for item in api.artifacts(run)]
    assert shown == [("one-page", "other text")]
    # In either order: two threads log, and each bundle of lines has what was logged by then.
    assert lines_of(api, run, "not shown on Prefect's pages: ConnectError: no server listens")
    assert lines_of(api, run, "not shown on Prefect's pages: KeyError: 'of the picture'")
