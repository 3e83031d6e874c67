"""The artifacts on Prefect's page of a whole run: plan, addresses, report card.

A `BackgroundWriter` writes everything in the background; a failure to write is logged only.
"""

import shlex
from collections.abc import Mapping

from flows.artifacts.runs import Run
from flows.building.build import Built
from flows.orchestration.stage_page import BackgroundWriter, name_of, resumed_text
from flows.plan.plan import Plan
from flows.plan.render import table, totals
from flows.render.table import Table, texts
from flows.render.text import size
from flows.stages import CHAT_MODELS
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
        text = f"{totals(plan)['summary']}. Store: {plan.store}"
        rows = table((item, item.stage.name) for item in plan.stages).tree()
        self._writer.show("plan", "table", rows, about=text)

    def show_artifacts(self, built: Mapping[str, Built]) -> None:
        """Show the results so far: addresses, and commands for them."""
        text = artifacts_text(self._run, built, self._store.url)
        self._writer.show("artifacts", "markdown", text, about=self._store.url)

    def show_report(self, text: str, uri: str) -> None:
        """Show the report card, unless it is too long; `uri` is that of its artifact."""
        # A longer card is still in the store, and `nanochat report` shows it.
        if len(text.encode()) <= MOST_TEXT:
            self._writer.show("report-card", "markdown", text, about=uri)

    def close(self) -> None:
        """Wait until everything is written or has failed."""
        self._writer.close()


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
