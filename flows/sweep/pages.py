"""The artifacts on Prefect's page of a sweep: plan, models, findings, picture.

A `BackgroundWriter` writes everything in the background; a failure to write is logged only.
"""

import base64
from collections.abc import Iterable

from flows.orchestration.stage_page import BackgroundWriter
from flows.sweep.files import Files, SweepReport
from flows.sweep.plan import SweepPlan, lines_of


class SweepPages:
    """The Prefect artifacts of the current flow run. Close it when the run ends."""

    def __init__(self, name: str, runs: Iterable[str]) -> None:
        """Tag the flow run with `runs`, the ids of the sweep's runs."""
        self._writer = BackgroundWriter(name)
        self._writer.tag_flow_run(*runs)

    def show_plan(self, planned: SweepPlan) -> None:
        """Show what the sweep is about to do."""
        lines = lines_of(planned)
        text = "\n".join(["```text", *lines, "```"])
        about = f"{lines[-1]}. Store: {planned.plan.store}"
        self._writer.show("plan", "markdown", text, about=about)

    def show_report(self, report: SweepReport, files: Files, cost: Iterable[str]) -> None:
        """Show the results: a table of models, sentences with the cost, a plot."""
        sentences = "\n".join(f"- {sentence}" for sentence in (*report.sentences, *cost))
        text = f"{sentences}\n\nPage on the machine that ran it: `{files.page}`\n"
        self._writer.show("models", "table", report.table.tree(), about=report.lead)
        self._writer.show("findings", "markdown", text, about="What the numbers say")
        if files.picture is not None:
            # As a data URL: Prefect's server has no place for files.
            data = base64.b64encode(files.picture.read_bytes()).decode()
            url = f"data:image/png;base64,{data}"
            self._writer.show("plot", "image", url, about=report.pictures[0].caption)

    def close(self) -> None:
        """Wait until everything is written or has failed."""
        self._writer.close()
