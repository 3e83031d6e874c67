"""The artifacts on Prefect's page of a whole run: plan, artifacts, scores, report card.

Each has a sentence, a short one: Prefect's cards show some 35 letters of it. A `BackgroundWriter`
writes everything in the background; a failure to write is logged only.
"""

import shlex
from collections.abc import Mapping
from typing import Any

from flows.artifacts.runs import Run
from flows.building.build import Built
from flows.orchestration.stage_page import BackgroundWriter, resumed_text
from flows.plan.plan import Plan
from flows.plan.render import table, totals
from flows.render.paired import scores_in
from flows.render.table import Table, texts
from flows.render.text import size
from flows.stages import CHAT_MODELS, EVALUATORS, MODELS

MAX_TEXT = 200_000  # bytes of markdown; more makes Prefect's pages slow


def show_plan(pages: BackgroundWriter, plan: Plan) -> None:
    """Show what the run is about to do, stage by stage."""
    text = f"What each stage does, and why: {totals(plan)['summary']}."
    rows = table((item, item.stage.name) for item in plan.stages).tree()
    pages.show("plan", "table", rows, about=text)


def show_artifacts(pages: BackgroundWriter, run: Run, built: Mapping[str, Built], url: str) -> None:
    """Show the results so far: addresses and commands for them, and scores if there are any.

    `url` is that of the store.
    """
    text = artifacts_text(run, built, url)
    pages.show("artifacts", "markdown", text, about="What was made, and how to use it.")
    if rows := score_table(built).tree():
        pages.show("scores", "table", rows, about="What each model scores.")


def show_report(pages: BackgroundWriter, text: str) -> None:
    """Show the report card, unless it is too long."""
    # A longer card is still in the store, and `nanochat report` shows it.
    if len(text.encode()) <= MAX_TEXT:
        about = "What was trained, and how well."
        pages.show("report-card", "markdown", text, about=about)


def score_table(built: Mapping[str, Built]) -> Table:
    """Return a row for each score with a column for each model that was evaluated."""
    evaluators = {m.label: EVALUATORS[m.name].name for m in MODELS}
    scores = {
        label: _scores(built[name].manifest.provenance.metrics)
        for label, name in evaluators.items()
        if name in built
    }
    names = dict.fromkeys(name for of_model in scores.values() for name in of_model)
    return Table(
        columns=texts("score", *scores),
        rows=[[name, *(of.get(name, "") for of in scores.values())] for name in names],
    )


def _scores(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return the scores among the metrics of an evaluation, with their intervals; no counts."""
    found = scores_in(metrics).items()
    return {name: score.text() for name, score in found if isinstance(metrics.get(name), float)}


def artifacts_text(run: Run, built: Mapping[str, Built], store: str) -> str:
    """Return the artifacts of the run as markdown, with the commands that fetch and use them."""
    place = f" --store {shlex.quote(store)}"
    rows = [_artifact_row(item) for item in built.values()]
    parts = [f"# {run.run}", f"Store: `{store}`"]
    if built:
        newest = list(built.values())[-1].manifest.name
        parts += [
            Table(columns=texts("stage", "in this run", "artifact", "size"), rows=rows).markdown(),
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
