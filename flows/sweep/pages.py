"""The artifacts on Prefect's page of a group: plan, models, findings, picture.

A `BackgroundWriter` writes everything in the background; a failure to write is logged only.
"""

import base64
from collections.abc import Iterable

from flows.orchestration.stage_page import BackgroundWriter
from flows.sweep.files import Files, GroupReport
from flows.sweep.plan import GroupPlan, lines_of


class GroupPages:
    """The Prefect artifacts of the current flow run. Close it when the run ends."""

    def __init__(self, name: str, runs: Iterable[str]) -> None:
        """Tag the flow run with `runs`, the ids of the group's runs, to be found by them."""
        self._tags = {f"run:{run}" for run in runs}
        self._writer = BackgroundWriter(name)
        self._writer.send(self._tag)

    def show_plan(self, planned: GroupPlan) -> None:
        """Show what the group is about to do."""
        lines = lines_of(planned)
        text = "\n".join(["```text", *lines, "```"])
        about = f"{lines[-1]}. Store: {planned.plan.store}"
        self._writer.send(lambda: self._writer.write("plan", "markdown", text, description=about))

    def show_report(self, report: GroupReport, files: Files, cost: Iterable[str]) -> None:
        """Show the results: a table of models, sentences with the cost, a plot."""
        table = [dict(zip(report.header, row, strict=True)) for row in report.rows]
        sentences = "\n".join(f"- {sentence}" for sentence in (*report.sentences, *cost))
        text = f"{sentences}\n\nPage on the machine that ran it: `{files.page}`\n"
        if table:
            self._write("models", "table", table, f"Store: {report.store}")
        self._write("findings", "markdown", text, "What the numbers say")
        if files.picture is not None:
            # As a data URL: Prefect's server has no place for files.
            data = base64.b64encode(files.picture.read_bytes()).decode()
            url = f"data:image/png;base64,{data}"
            self._write("plot", "image", url, report.pictures[0].caption)

    def close(self) -> None:
        """Wait until everything is written or has failed."""
        self._writer.close()

    def _write(self, what: str, kind: str, data: object, about: str) -> None:
        # One send each, so that a failure of one does not lose the others.
        self._writer.send(lambda: self._writer.write(what, kind, data, description=about))

    def _tag(self) -> None:
        found = self._writer.flow_run_id
        assert found is not None  # this class is used in flow runs only
        # The update replaces all tags, so it includes those that the flow run has.
        tags = {*self._writer.client.read_flow_run(found).tags, *self._tags}
        self._writer.client.update_flow_run(found, tags=tags)
