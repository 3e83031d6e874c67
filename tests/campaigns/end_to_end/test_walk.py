"""The whole product as its users meet it: up, form, cancel, failure, retry, fetch, down.

Everything but the commands `up`, `fetch` and `down` goes over HTTP, as Prefect's pages do it. `-s`
prints how long a run takes to get going, and one that has nothing to do. What the form offers and
refuses: tests/integration/deployments/test_forms.py.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.stages import STAGES
from tests.campaigns.end_to_end.small import (
    SECONDS,
    newest_step,
    stages_of,
    start_flow,
)
from tests.support.deployments.prefect_api import unix, wait_until
from tests.support.infra.stack.live import LiveStack

pytestmark = [pytest.mark.prefect, pytest.mark.torch, pytest.mark.timeout(3600)]

NAME = "main"  # of the run
FAILING = "sft"
BEFORE_FAILURE = {"shards", "task_data", "tokenizer", "tokens", "rows", "pretrain", "midtrain"}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LiveStack]:
    stack = LiveStack(tmp_path / "home", port=4700)
    yield stack
    stack.end()


def test_up_form_cancel_failure_retry_fetch_and_down(stack: LiveStack) -> None:
    come_up(stack)
    run = train(stack)
    look_at_artifacts(stack, run)
    run_cached(stack)
    fetch_artifact(stack)
    stack.down()
    wait_until(lambda: not stack.processes(), seconds=15, what="its processes to end")
    assert not stack.api.answers()


def come_up(stack: LiveStack) -> None:
    """Give `nanochat up` twice in a fresh home: the second finds the first."""
    assert not stack.home.exists()
    stack.start()

    def parts() -> set[int]:
        return {process.pid for process in stack.processes("server", "supervisor", "worker")}

    before, first = parts(), stack.api.url
    assert len(before) >= 4, before
    stack.start()
    wait_until(lambda: parts() == before, seconds=60, what="the end of the second command")
    assert stack.api.url == first
    for name in ("nanochat/nanochat", "one-stage/gpu", "nanochat-eval/main", "sweep/sweep"):
        assert stack.api.deployment(name)["name"] == name.partition("/")[2]
    for pool in ("cpu", "gpu"):

        def has_worker(pool: str = pool) -> bool:
            workers = stack.api.post(f"work_pools/{pool}/workers/filter", {})
            return any(worker["status"] == "ONLINE" for worker in workers)

        wait_until(has_worker, seconds=60, what=f"a worker of {pool}")


def train(stack: LiveStack) -> str:
    """Run the whole flow, cancelled once, failed once, retried twice; return its id."""
    api = stack.api
    run = start_flow(stack, NAME, fields={"retries": 1}, pretrain__num_steps=600)
    wait_until(lambda: api.run(run)["state_type"] == "RUNNING", seconds=90, what="RUNNING")
    started = wait_until(lambda: first_start(stack), seconds=120, what="a job")
    print(f"\nRUNNING to the first job: {started - unix(api.run(run)['start_time']):.2f} s")
    wait_until(lambda: newest_step(stack, "pretrain"), seconds=300, what="a step of pretraining")
    began = time.monotonic()
    api.press_cancel(run)
    wait_until(lambda: not stack.processes("job"), seconds=60, what="the jobs to end")
    took = time.monotonic() - began
    print(f"no job {took:.1f} s after Cancel")
    assert took < 30
    commits = list((stack.home / "work" / "pretrain").glob("*/checkpoints/step-*/COMMIT.json"))
    saved = max(int(commit.parent.name.partition("-")[2]) for commit in commits)
    assert api.wait_for_end(run, seconds=120)["state_type"] == "CANCELLED"

    api.press_retry(run)
    wait_until(lambda: stack.processes("job"), seconds=300, what="the job to resume")
    blocked = stack.home / "store" / FAILING
    blocked.touch()  # a file where the stage's directory in the store should be
    failed = api.wait_for_end(run, seconds=SECONDS)
    assert (failed["state_type"], failed["run_count"]) == ("FAILED", 2), failed["state"]
    logs = sorted((stack.home / "store" / "pretrain").glob("*/**/events.jsonl"))
    events = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    assert saved in [event["step"] for event in events if event["kind"] == "start"]
    assert stages_of(stack, run)[FAILING] == "Failed"

    blocked.unlink()
    api.press_retry(run)
    ended = api.wait_for_end(run, seconds=SECONDS)
    assert (ended["state_type"], ended["run_count"]) == ("COMPLETED", 3), ended["state"]
    assert ended["name"] == failed["name"], "a retry is the same run"
    states = stages_of(stack, run)
    assert states.keys() == {stage.name for stage in STAGES}
    assert {states[stage] for stage in BEFORE_FAILURE} == {"Cached"}, states
    assert states[FAILING] in ("Completed", "Resumed"), states
    return run


def first_start(stack: LiveStack) -> float:
    """Return when the first of the jobs was started whose directories exist; 0 for none yet."""
    records = [path.read_text() for path in (stack.home / "work").glob("*/*/segments.jsonl")]
    lines = [json.loads(line) for text in records for line in text.splitlines()]
    return min((line["started"] for line in lines), default=0.0)


def look_at_artifacts(stack: LiveStack, run: str) -> None:
    """Look at what the run's page shows, and at the curves of the stages that it requested."""
    found = [a for a in stack.api.artifacts(run) if a["key"]]
    keys = {a["key"].removeprefix(f"{NAME}-"): a for a in found}
    assert keys.keys() >= {"plan", "artifacts", "scores", "report-card"}, sorted(keys)
    assert keys["report-card"]["type"] == "markdown"
    assert "val_bpb" in keys["report-card"]["data"]
    # On the requests' pages: bars are removed when a stage is done.
    tag = f"run:{stack.api.run(run)['name']}"
    requests = stack.api.runs(flow_runs={"tags": {"all_": [tag]}})
    found = [a for request in requests for a in stack.api.artifacts(request["id"])]
    curves = {a["key"]: a["data"] for a in found if a["type"] == "image"}
    for stage in ("pretrain", FAILING):
        assert curves.get(f"{NAME}-{stage}-curve") is not None, (tag, sorted(curves))


def run_cached(stack: LiveStack) -> None:
    """Submit the same form again: every stage is Cached."""
    run = start_flow(stack, NAME, pretrain__num_steps=600)
    ended = stack.api.wait_for_end(run, seconds=SECONDS)
    assert ended["state_type"] == "COMPLETED", ended["state"]
    # Prefect hears of the states of a run's tasks by events, a while after the run's own.
    wait_until(
        lambda: set(stages_of(stack, run).values()) == {"Cached"},
        seconds=60,
        what=f"every stage Cached: {stages_of(stack, run)}",
    )
    print(f"RUNNING to COMPLETED, all Cached: {ended['total_run_time']:.2f} s")


def fetch_artifact(stack: LiveStack) -> None:
    """Fetch a model, and compare every file with its manifest."""
    target = stack.home.parent / "fetched"
    stack.command("fetch", f"rl@{NAME}", "--to", str(target))
    (manifest,) = (stack.home / "store" / "rl").glob("*/manifest.json")
    for file in json.loads(manifest.read_text(encoding="utf-8"))["files"]:
        content = (target / file["path"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == file["sha256"], file["path"]
