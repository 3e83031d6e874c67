"""What Prefect's page of a whole run shows: its plan, scores, curves, artifacts and report card.

Everything is written in the background by a `BackgroundWriter`; what cannot be shown costs nothing
else.
"""

import contextlib
import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from flows.artifacts.runs import Run
from flows.artifacts.transfer import in_parallel
from flows.build.build import Built
from flows.identity.fingerprint import short
from flows.identity.manifest import File
from flows.orchestration.stage_page import BackgroundWriter, name_of, resumed_text, table
from flows.plan.plan import STATES, Plan
from flows.plan.render import render
from flows.render.charts import LEARNING
from flows.render.loss_curve import LossCurves, mermaid
from flows.render.text import percent, size
from flows.report.scores import CHAT_MODELS, Measured, measured
from infra.storage.base import Store

MOST_TEXT = 200_000  # bytes of markdown; more makes Prefect's pages slow


class RunPages:
    """The artifacts of the flow run that it is made in. Close it when the run ends."""

    def __init__(self, run: Run, store: Store) -> None:
        self._run = run
        self._store = store
        self._courier = BackgroundWriter(name_of(run.run))
        self._courier.send(self._tag)

    def show_plan(self, plan: Plan) -> None:
        """What the run is about to do, stage by stage."""
        text = f"{render(plan)[-1]}. Store: {plan.store}"
        self._courier.send(
            lambda: self._courier.write("plan", "table", plan_rows(plan), description=text)
        )

    def show_artifacts(self, built: Mapping[str, Built]) -> None:
        """What there is by now: addresses and commands, scores side by side, curves."""
        for write in (self._write_artifacts, self._write_scores, self._write_curves):
            self._courier.send(lambda write=write: write(built))

    def show_report(self, text: str, uri: str) -> None:
        """The report card; `uri`: of its artifact."""
        if len(text.encode()) <= MOST_TEXT:
            self._courier.send(
                lambda: self._courier.write("report-card", "markdown", text, description=uri)
            )

    def close(self) -> None:
        """Wait until everything is written, or given up."""
        self._courier.close()

    def _tag(self) -> None:
        """The flow run is found by the run's id, as the runs are that it orders elsewhere."""
        found, client = self._courier.flow_run_id, self._courier.client
        assert found is not None  # only made in a flow run
        tags = {*client.read_flow_run(found).tags, f"run:{self._run.run}"}  # a series has several
        client.update_flow_run(found, tags=tags)

    def _write_artifacts(self, built: Mapping[str, Built]) -> None:
        text = artifacts_text(self._run, built, self._store.url)
        self._courier.write("artifacts", "markdown", text, description=self._store.url)

    def _write_scores(self, built: Mapping[str, Built]) -> None:
        if rows := score_rows(read_scores(self._store, built)):
            about = (
                "In brackets the 95 % interval; of tasks, the share of questions answered right."
            )
            self._courier.write("scores", "table", rows, description=about)

    def _write_curves(self, built: Mapping[str, Built]) -> None:
        if text := curves_text(read_curves(self._store, built)):
            self._courier.write("curves", "markdown", text, description="Training, step by step")


_MOST_LOG = 20_000_000  # bytes of a job's events that are read for a curve
_THREADS = 4  # small files read at the same time
_MODELS = {"base_eval": "base", **{f"chat_eval_{s}": name for s, name in CHAT_MODELS.items()}}
_OVERALL = {"val_bpb": "bits per byte", "core": "CORE", "chatcore": "ChatCORE"}
_CHAT_STAGES = ("rl", "sft", "midtrain")  # the first that was built is what people talk to


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """A row for each stage: what becomes of it, and why."""
    return [
        {
            "stage": item.stage.name,
            "state": f"{item.state} {STATES[item.state]}",
            "fingerprint": short(item.fingerprint) if item.fingerprint else "",
            "reason": item.reason,
            "estimated seconds": round(item.estimate.seconds) if item.estimate else None,
        }
        for item in plan.stages
    ]


def read_scores(store: Store, built: Mapping[str, Built]) -> dict[str, dict[str, Any]]:
    """scores.json of each model that was judged, by the model's name."""
    found = [(name, built[stage].manifest) for stage, name in _MODELS.items() if stage in built]
    files = [(name, _file(m.files, "scores.json")) for name, m in found]
    there = [(name, file) for name, file in files if file is not None]
    read = in_parallel(lambda item: json.loads(_get(store, item[1])), there, threads=_THREADS)
    return {name: tree for (name, _), tree in zip(there, read, strict=True)}


def score_rows(scores: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """What every model scored, side by side: a row a number, a column a model.

    `questions`: how many a task has; each model was asked the same.
    """
    rows = [
        {"score": title, **{m: _measured(measured(tree, n)) for m, tree in scores.items()}}
        for n, title in _OVERALL.items()
    ]
    for task in dict.fromkeys(task for tree in scores.values() for task in _tasks(tree)):
        found = {model: _tasks(tree).get(task) for model, tree in scores.items()}
        row = {model: _share(of_task) if of_task else "" for model, of_task in found.items()}
        asked = sorted({str(of_task["total"]) for of_task in found.values() if of_task})
        rows.append({"score": task, **row, "questions": ", ".join(asked)})
    shown = [row for row in rows if any(row[model] for model in scores)]
    return [{**row, "questions": row.get("questions", "")} for row in shown]


def _tasks(tree: Mapping[str, Any]) -> Mapping[str, dict[str, Any]]:
    return tree.get("tasks") or {}


def _measured(score: Measured | None) -> str:
    return score.text(3) if score else ""


def _share(task: Mapping[str, Any]) -> str:
    """Narrow, so that all models fit beside each other: "86.0 % (80.5-90.1)"."""
    low, high = 100 * task["low"], 100 * task["high"]
    return f"{percent(task['accuracy'])} ({low:.1f}-{high:.1f})"


def read_curves(store: Store, built: Mapping[str, Built]) -> list[LossCurves]:
    """How the training stages among these went, from the logs beside their artifacts."""
    stages = [s for s in dict.fromkeys(q.stage for q in LEARNING) if s in built]
    files = [(stage, _file(built[stage].manifest.logs, "events.jsonl")) for stage in stages]
    there = [(stage, f) for stage, f in files if f is not None and f.size <= _MOST_LOG]
    texts = in_parallel(lambda item: _get(store, item[1]), there, threads=_THREADS)
    found: list[LossCurves] = []
    for (stage, _), text in zip(there, texts, strict=True):
        curves = LossCurves(stage)
        for line in text.splitlines():
            with contextlib.suppress(ValueError):  # the half line of a killed job
                curves.add(json.loads(line))
        found.append(curves)
    return found


def _get(store: Store, file: File) -> bytes:
    return store.get(file.key, size=file.size)


def _file(files: Iterable[File], path: str) -> File | None:
    return next((file for file in files if file.path == path), None)


def curves_text(curves: Iterable[LossCurves]) -> str:
    """All curves that can be drawn, as markdown; empty when there are none."""
    return "\n\n".join(filter(None, (mermaid(of_stage.shown()) for of_stage in curves)))


def artifacts_text(run: Run, built: Mapping[str, Built], store: str) -> str:
    """What the run made or found, where it is, and the commands that bring it here."""
    place = f" --store {shlex.quote(store)}"
    rows = [_artifact_row(item) for item in built.values()]
    parts = [f"# {run.run}", f"Store: `{store}`"]
    if built:
        newest = list(built.values())[-1].manifest.name
        parts += [
            table(["stage", "in this run", "artifact", "size"], rows),
            "To have an artifact's files:",
            _commands(f"nanochat fetch {newest}{place}"),
        ]
    if chat := next((built[stage] for stage in _CHAT_STAGES if stage in built), None):
        name = chat.manifest.name
        parts += [
            "To talk to the model, on the terminal and in a browser:",
            _commands(f"nanochat chat {name}{place}", f"nanochat serve {name}{place}"),
        ]
    parts += ["To look at the run:", _commands(f"nanochat status {run.run}{place}")]
    # Not in the table, which the pages let grow beyond its place.
    parts += ["Addresses:", "\n".join(["```text", *(item.uri for item in built.values()), "```"])]
    return "\n\n".join(parts) + "\n"


def _artifact_row(item: Built) -> list[str]:
    manifest = item.manifest
    return [
        manifest.stage,
        "Cached" if item.cached else resumed_text(manifest) or "built",
        f"`{manifest.name}`",
        size(sum(file.size for file in manifest.files)),
    ]


def _commands(*lines: str) -> str:
    return "\n".join(["```console", *(f"$ {line}" for line in lines), "```"])
