"""The whole product as its users meet it: up, form, cancel, failure, retry, schedule, fetch, down.

Everything but the commands `up`, `fetch` and `down` goes over HTTP, as Prefect's pages do it.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.campaigns.end_to_end.diary import Diary
from tests.campaigns.end_to_end.small import form_values
from tests.support.deployments.prefect_api import FINAL, wait_until
from tests.support.infra.stack.live import LiveStack

DEPLOYMENTS = (
    "nanochat/nanochat",
    "one-stage/gpu",
    "nanochat-eval/main",
    "sweep/sweep",
)
STAGES = 14
NAME = "main"  # of the run; what the nightly evaluation judges
FAILING = "sft"
BEFORE_FAILURE = ("shards", "task_data", "tokenizer", "tokens", "rows", "pretrain", "midtrain")
WRONG = (  # what a person may mistype, each refused by the API
    {"profile": "tinny"},
    {"depth": 0},
    {"depth": "deep"},
    {"from_stage": "pretrian"},
    {"force": ["nothing"]},
    {"gpus": -1},
    {"nodes": 0},
    {"overrides": "pretrain.num_steps=1"},
)
SECONDS_FOR_A_FLOW = 1800.0  # two minutes on an idle machine


def walk(stack: LiveStack, diary: Diary) -> None:
    """All of it, on a home that nobody used before."""
    come_up(stack, diary)
    look_at_form(stack, diary)
    refuse_wrong_values(stack, diary)
    run = train(stack, diary)
    look_at_artifacts(stack, diary, run)
    run_cached(stack, diary)
    evaluate_on_schedule(stack, diary)
    fetch_artifact(stack, diary)
    go_down(stack, diary)


def come_up(stack: LiveStack, diary: Diary) -> None:
    """`nanochat up`, twice."""
    with diary.check("`nanochat up` in a fresh home") as entry:
        assert not stack.home.exists()
        stack.start()
        entry.found = stack.api.url
    with diary.check("a second `nanochat up` finds the first") as entry:
        before = {p.pid for p in stack.processes("server", "supervisor", "worker")}
        assert len(before) >= 4, before
        first = stack.api.url
        stack.start()
        after = {p.pid for p in stack.processes("server", "supervisor", "worker")}
        assert (stack.api.url, after) == (first, before)
        entry.found = f"the same {len(before)} processes"
    with diary.check("deployments, pools and their workers") as entry:
        for name in DEPLOYMENTS:
            assert stack.api.deployment(name)["name"] == name.partition("/")[2]
        for pool in ("cpu", "gpu"):
            wait_until(
                lambda pool=pool: [
                    w
                    for w in stack.api.post(f"work_pools/{pool}/workers/filter", {})
                    if w["status"] == "ONLINE"
                ],
                seconds=60,
                what=f"a worker of {pool}",
            )
        entry.found = ", ".join(DEPLOYMENTS)


def look_at_form(stack: LiveStack, diary: Diary) -> None:
    """What the run form is made from: descriptions, choices and bounds."""
    with diary.check("the form of nanochat/nanochat") as entry:
        schema = stack.api.deployment(DEPLOYMENTS[0])["parameter_openapi_schema"]
        fields: dict[str, Any] = schema["properties"]
        bare = [name for name, field in fields.items() if not field.get("description")]
        assert bare == [], f"without a description: {bare}"
        assert "tiny" in _choices(fields["profile"], schema)
        assert FAILING in _choices(fields["from_stage"], schema)
        assert FAILING in _choices(fields["force"], schema)
        text = json.dumps(fields["depth"])
        assert "minimum" in text, text
        assert "maximum" in text, text
        entry.found = f"{len(fields)} fields, each described; {', '.join(fields)}"


def _choices(field: Mapping[str, Any], schema: Mapping[str, Any]) -> set[str]:
    """Everything that a field offers, however deep its schema has it."""
    found = set[str](map(str, field.get("enum", ())))
    for part in (*field.get("anyOf", ()), *field.get("allOf", ())):
        found |= _choices(part, schema)
    if "items" in field:
        found |= _choices(field["items"], schema)
    if "$ref" in field:
        found |= _choices(schema["definitions"][field["$ref"].rpartition("/")[2]], schema)
    return found


def refuse_wrong_values(stack: LiveStack, diary: Diary) -> None:
    """By the API where the schema knows better, else in the first second of the run."""
    deployment = stack.api.deployment(DEPLOYMENTS[0])
    with diary.check("wrong values are refused by the API") as entry:
        values = form_values(run_name="wrong")
        said = ""
        for wrong in WRONG:
            answer = stack.api.submit_form(deployment, {**values, **wrong}, name="wrong")
            assert answer.status_code in (409, 422), (wrong, answer.status_code, answer.text)
            said = answer.json()["detail"]
        assert stack.api.runs_of(deployment) == []
        entry.found = f"{len(WRONG)} of {len(WRONG)}; the last: {said}"[:200]
    with diary.check("a setting that there is not ends the run at once") as entry:
        run = stack.api.trigger(deployment, form_values(run_name="wrong", pretrain__num_step=1))
        ended = stack.api.wait_for_end(run, seconds=120)
        assert ended["state_type"] == "FAILED", ended["state"]
        assert "pretrain.num_step" in ended["state"]["message"], ended["state"]
        assert stack.api.task_runs(run) == []
        entry.found = f"{_seconds(ended):.1f} s of run; {ended['state']['message']}"[:200]


def _seconds(run: Mapping[str, Any]) -> float:
    return run["total_run_time"]


def train(stack: LiveStack, diary: Diary) -> str:
    """One run of the whole flow, cancelled once, failed once, retried twice; gives its id."""
    api = stack.api
    values = form_values(run_name=NAME, pretrain__num_steps=600)
    with diary.check("a run is made with the form") as entry:
        run = api.trigger(api.deployment(DEPLOYMENTS[0]), {**values, "retries": 1})
        wait_until(lambda: api.run(run)["state_type"] == "RUNNING", seconds=90, what="RUNNING")
        entry.found = run
    with diary.check("pretraining is under way") as entry:
        step = wait_until(lambda: newest_step(stack, "pretrain"), seconds=300, what="a step")
        entry.found = f"step {step}"
    with diary.check("Cancel stops every job within 30 s, and its state is saved") as entry:
        began = time.monotonic()
        api.press_cancel(run)
        wait_until(lambda: not stack.processes("job"), seconds=60, what="the jobs to end")
        took = time.monotonic() - began
        assert took < 30, took
        saved = _saved(stack, "pretrain")
        assert saved, "no checkpoint"
        assert api.wait_for_end(run, seconds=120)["state_type"] == "CANCELLED"
        entry.found = f"no job after {took:.1f} s; checkpoint of step {saved}"
    blocked = stack.home / "store" / FAILING
    with diary.check("Retry goes on; then the store refuses a stage") as entry:
        api.press_retry(run)
        wait_until(lambda: stack.processes("job"), seconds=300, what="the job to go on")
        blocked.touch()  # a file where the stage's directory in the store should be
        failed = api.wait_for_end(run, seconds=SECONDS_FOR_A_FLOW)
        assert failed["state_type"] == "FAILED", failed["state"]
        assert failed["run_count"] == 2
        assert str(saved) in _resumed(stack, "pretrain"), _resumed(stack, "pretrain")
        states = stages_of(stack, run)
        assert states[FAILING] == "Failed", states
        entry.found = f"{_resumed(stack, 'pretrain')}; {failed['state']['message']}"[:200]
    with diary.check("Retry after the fault is gone completes") as entry:
        blocked.unlink()
        api.press_retry(run)
        ended = api.wait_for_end(run, seconds=SECONDS_FOR_A_FLOW)
        assert ended["state_type"] == "COMPLETED", ended["state"]
        assert ended["run_count"] == 3
        assert ended["name"] == failed["name"], "a retry is the same run"
        states = stages_of(stack, run)
        assert len(states) == STAGES, states
        assert {states[s] for s in BEFORE_FAILURE} == {"Cached"}, states
        assert states[FAILING] in ("Completed", "Resumed"), states
        cached = sorted(s for s, state in states.items() if state == "Cached")
        entry.found = f"{len(cached)} of {STAGES} Cached: {', '.join(cached)}"
    return run


def stages_of(stack: LiveStack, run: str) -> dict[str, str]:
    """Stage -> name of the state of its task run, of the run's last attempt."""
    count = stack.api.run(run)["run_count"]
    tasks = [t for t in stack.api.task_runs(run) if t["flow_run_run_count"] == count]
    return {_stage(task["name"]): task["state_name"] for task in tasks}


def _stage(task_run: str) -> str:
    """Task runs are called as their stage, perhaps with something after it."""
    return task_run.split()[0].split("/")[0]


def newest_step(stack: LiveStack, stage: str) -> int | None:
    """The last step that the unfinished job of a stage tells of."""
    steps = [e["step"] for e in _events(stack, stage) if e.get("kind") == "step"]
    return steps[-1] if steps and steps[-1] > 0 else None


def _events(stack: LiveStack, stage: str) -> list[dict[str, Any]]:
    lines = [
        line
        for log in sorted((stack.home / "work" / stage).glob("*/events.jsonl"))
        for line in log.read_text(encoding="utf-8").splitlines()
    ]
    return [json.loads(line) for line in lines if line.endswith("}")]


def _saved(stack: LiveStack, stage: str) -> int | None:
    """Step of the newest checkpoint of an unfinished job."""
    commits = (stack.home / "work" / stage).glob("*/checkpoints/step-*/COMMIT.json")
    return max((int(c.parent.name.partition("-")[2]) for c in commits), default=None)


def _resumed(stack: LiveStack, stage: str) -> str:
    """What the finished stage's log says about going on where it was."""
    logs = sorted((stack.home / "store" / stage).glob("*/**/events.jsonl"))
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    starts = [line["step"] for line in lines if line["kind"] == "start"]
    return f"{stage} started at steps {starts}"


def look_at_artifacts(stack: LiveStack, diary: Diary, run: str) -> None:
    """What the run's page shows."""
    with diary.check("artifacts of the run") as entry:
        found = [a for a in stack.api.artifacts(run) if a["key"]]
        keys = {a["key"].removeprefix(f"{NAME}-"): a for a in found}
        assert {"plan", "artifacts", "scores", "report-card"} <= set(keys), sorted(keys)
        assert keys["report-card"]["type"] == "markdown"
        assert "val_bpb" in keys["report-card"]["data"]
        entry.found = f"{len(keys)}: {', '.join(sorted(keys))}"
    with diary.check("curves of the stages that were ordered") as entry:
        # On the orders' pages: bars are removed when a stage is done.
        tag = f"run:{stack.api.run(run)['name']}"
        orders = stack.api.runs(flow_runs={"tags": {"all_": [tag]}})
        found = [a for order in orders for a in stack.api.artifacts(order["id"])]
        curves = {a["key"]: a["data"] for a in found if a["type"] == "image"}
        for stage in ("pretrain", FAILING):
            assert curves.get(f"{NAME}-{stage}-curve") is not None, (tag, sorted(curves))
        entry.found = f"{len(curves)} on {len(orders)} pages: {', '.join(sorted(curves))}"


def run_cached(stack: LiveStack, diary: Diary) -> None:
    """The same again."""
    with diary.check("the same form again: every stage Cached") as entry:
        values = form_values(run_name=NAME, pretrain__num_steps=600)
        run = stack.api.trigger(stack.api.deployment(DEPLOYMENTS[0]), values)
        ended = stack.api.wait_for_end(run, seconds=SECONDS_FOR_A_FLOW)
        assert ended["state_type"] == "COMPLETED", ended["state"]
        # Prefect hears of the states of a run's tasks by events, a while after the run's own.
        wait_until(
            lambda: set(stages_of(stack, run).values()) == {"Cached"},
            seconds=60,
            what=f"every stage Cached: {stages_of(stack, run)}",
        )
        entry.found = f"RUNNING to COMPLETED {_seconds(ended):.1f} s"


def evaluate_on_schedule(stack: LiveStack, diary: Diary) -> None:
    """The nightly evaluation is set going, every minute, with a suite that was never run."""
    api = stack.api
    deployment = api.deployment("nanochat-eval/main")
    schedule = deployment["schedules"][0]
    place = f"deployments/{deployment['id']}"
    assert deployment["paused"] or not schedule["active"]
    suite = 'chat_eval.tasks=[{"name": "arithmetic", "max_examples": 4, "max_new_tokens": 8}]'
    with diary.check("the evaluation runs when its schedule says so") as entry:
        changed = {
            "schedule": {"cron": "* * * * *", "timezone": "UTC"},
            "active": True,
            "parameters": {"overrides": [suite], "place": ["threads=1"]},
        }
        answer = api.send("PATCH", f"{place}/schedules/{schedule['id']}", changed)
        assert answer.is_success, answer.text
        api.post(f"{place}/resume_deployment", {})

        def ended() -> list[dict[str, Any]] | None:
            runs = [r for r in api.runs_of(deployment) if r["state_type"] in FINAL]
            return runs if len(runs) >= 2 else None

        runs = wait_until(ended, seconds=420, what="two scheduled evaluations")
        api.post(f"{place}/pause_deployment", {})
        runs = sorted(runs, key=lambda r: r["start_time"])[:2]
        assert [r["state_type"] for r in runs] == ["COMPLETED"] * 2, [r["state"] for r in runs]
        assert all(r["auto_scheduled"] for r in runs)
        states = [list(stages_of(stack, r["id"]).values()) for r in runs]
        assert states == [["Completed"], ["Cached"]], states
        seconds = ", ".join(f"{_seconds(r):.1f}" for r in runs)
        entry.found = f"two runs by the clock, of {seconds} s: {states}"


def fetch_artifact(stack: LiveStack, diary: Diary) -> None:
    """`nanochat fetch`, and every file against its manifest."""
    with diary.check("`nanochat fetch rl@main`, its files verified") as entry:
        target = stack.home.parent / "fetched"
        stack.command("fetch", f"rl@{NAME}", "--to", str(target))
        manifest = json.loads(_only((stack.home / "store" / "rl").glob("*/manifest.json")))
        files: Sequence[dict[str, Any]] = manifest["files"]
        for file in files:
            content = (target / file["path"]).read_bytes()
            assert hashlib.sha256(content).hexdigest() == file["sha256"], file["path"]
        entry.found = f"{len(files)} files, {sum(f['size'] for f in files):,} bytes"


def _only(paths: Any) -> str:
    (path,) = paths
    return Path(path).read_text(encoding="utf-8")


def go_down(stack: LiveStack, diary: Diary) -> None:
    """`nanochat down`."""
    with diary.check("`nanochat down` leaves no process") as entry:
        stack.down()
        wait_until(lambda: not stack.processes(), seconds=15, what="its processes to end")
        assert not stack.api.answers()
        entry.found = "none"
