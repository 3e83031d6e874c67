"""The artifacts on Prefect's page of a whole run: plan, scores, addresses, report card.

A `BackgroundWriter` writes everything in the background; a failure to write is logged only.
"""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from flows.artifacts.runs import Run
from flows.artifacts.transfer import in_parallel, read_file
from flows.build.build import Built
from flows.identity.ref import short
from flows.orchestration.stage_page import BackgroundWriter, name_of, resumed_text
from flows.plan.plan import STATES, Plan
from flows.plan.render import render
from flows.render.score import Score
from flows.render.table import markdown_table
from flows.render.text import percent, size
from flows.report.scores import measured
from flows.stages import CHAT_MODELS, EVALUATORS, MODELS
from infra.storage.base import Store

MOST_TEXT = 200_000  # bytes of markdown; more makes Prefect's pages slow


class RunPages:
    """The Prefect artifacts of the current flow run. Close it when the run ends."""

    def __init__(self, run: Run, store: Store) -> None:
        self._run = run
        self._store = store
        self._writer = BackgroundWriter(name_of(run.run))
        self._writer.tag_flow_run(run.run)

    def show_plan(self, plan: Plan) -> None:
        """Show what the run is about to do, stage by stage."""
        text = f"{render(plan)[-1]}. Store: {plan.store}"
        self._writer.show("plan", "table", plan_rows(plan), about=text)

    def show_artifacts(self, built: Mapping[str, Built]) -> None:
        """Show the results so far: addresses and commands, and scores side by side."""
        # One send each, so that a failure of one does not lose the other.
        self._writer.send(lambda: self._write_artifacts(built))
        self._writer.send(lambda: self._write_scores(built))

    def show_report(self, text: str, uri: str) -> None:
        """Show the report card, unless it is too long; `uri` is that of its artifact."""
        # A longer card is still in the store, and `nanochat report` shows it.
        if len(text.encode()) <= MOST_TEXT:
            self._writer.show("report-card", "markdown", text, about=uri)

    def close(self) -> None:
        """Wait until everything is written or has failed."""
        self._writer.close()

    def _write_artifacts(self, built: Mapping[str, Built]) -> None:
        text = artifacts_text(self._run, built, self._store.url)
        self._writer.write("artifacts", "markdown", text, description=self._store.url)

    def _write_scores(self, built: Mapping[str, Built]) -> None:
        if rows := score_rows(read_scores(self._store, built)):
            about = (
                "In brackets the 95 % interval; for tasks, the share of questions answered right."
            )
            self._writer.write("scores", "table", rows, description=about)


_THREADS = 4  # small files read at the same time
_OVERALL = {"val_bpb": "bits per byte", "core": "CORE", "chatcore": "ChatCORE"}


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return a row for each stage: its state in the plan, and the reason."""
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
    """Read scores.json of each model that was evaluated; return them by the model's name."""
    evaluated = [(model.label, built.get(EVALUATORS[model.name].name)) for model in MODELS]
    found = [(label, item.manifest) for label, item in evaluated if item]
    read = in_parallel(lambda i: read_file(store, i[1], "scores.json"), found, threads=_THREADS)
    pairs = zip(found, read, strict=True)
    return {label: json.loads(data) for (label, _), data in pairs if data is not None}


def score_rows(scores: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the scores side by side: a row for each metric or task, a column for each model.

    `questions` is their number in a task, the same for each model.
    """
    # The pages take the columns from the rows' keys, so the last line gives all rows all columns.
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


def _measured(score: Score | None) -> str:
    return score.text(decimals=3) if score else ""


def _share(task: Mapping[str, Any]) -> str:
    """Format an accuracy with its interval: "86.0 % (80.5-90.1)"."""
    # Narrow, so that the columns of all models fit on Prefect's page.
    low, high = 100 * task["low"], 100 * task["high"]
    return f"{percent(task['accuracy'])} ({low:.1f}-{high:.1f})"


def artifacts_text(run: Run, built: Mapping[str, Built], store: str) -> str:
    """Return the artifacts of the run as markdown, with the commands that fetch and use them."""
    place = f" --store {shlex.quote(store)}"
    rows = [_artifact_row(item) for item in built.values()]
    parts = [f"# {run.run}", f"Store: `{store}`"]
    if built:
        newest = list(built.values())[-1].manifest.name
        parts += [
            markdown_table(["stage", "in this run", "artifact", "size"], rows),
            "To have an artifact's files:",
            _commands(f"nanochat fetch {newest}{place}"),
        ]
    if chats := [built[stage.name] for stage in CHAT_MODELS if stage.name in built]:
        name = chats[-1].manifest.name
        parts += [
            "To talk to the model, on the terminal and in a browser:",
            _commands(f"nanochat chat {name}{place}", f"nanochat serve {name}{place}"),
        ]
    parts += ["To look at the run:", _commands(f"nanochat status {run.run}{place}")]
    # Not in the table: a long cell makes Prefect's page overflow.
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
