"""The artifacts on Prefect's page of a series: plan, models, scaling law, picture.

A `BackgroundWriter` writes everything in the background; a failure to write is logged only.
"""

import base64
from collections.abc import Iterable

from flows.miniseries.files import Files
from flows.miniseries.findings import HEADER, Findings, rows, sentences
from flows.miniseries.plan import SeriesPlan, lines_of
from flows.orchestration.stage_page import BackgroundWriter


class SeriesPages:
    """The Prefect artifacts of the current flow run. Close it when the run ends."""

    def __init__(self, name: str, runs: Iterable[str]) -> None:
        """Tag the flow run with `runs`, the ids of the series' runs, to be found by them."""
        self._tags = {f"run:{run}" for run in runs}
        self._courier = BackgroundWriter(f"miniseries {name}")
        self._courier.send(self._tag)

    def show_plan(self, planned: SeriesPlan) -> None:
        """Show what the series is about to do."""
        lines = lines_of(planned)
        text = "\n".join(["```text", *lines, "```"])
        about = f"{lines[-1]}. Store: {planned.plan.store}"
        self._courier.send(lambda: self._courier.write("plan", "markdown", text, description=about))

    def show_findings(self, findings: Findings, files: Files) -> None:
        """Show the results: a table of models, the law, a plot."""
        # One send each, so that a failure of one does not lose the others.
        for write in (self._write_models, self._write_law, self._write_plot):
            self._courier.send(lambda write=write: write(findings, files))

    def close(self) -> None:
        """Wait until everything is written or has failed."""
        self._courier.close()

    def _tag(self) -> None:
        found = self._courier.flow_run_id
        assert found is not None  # this class is used in flow runs only
        # The update replaces all tags, so it includes those that the flow run has.
        tags = {*self._courier.client.read_flow_run(found).tags, *self._tags}
        self._courier.client.update_flow_run(found, tags=tags)

    def _write_models(self, findings: Findings, files: Files) -> None:
        table = [dict(zip(HEADER, row, strict=True)) for row in rows(findings)]
        if table:
            self._courier.write("models", "table", table, description=f"Store: {findings.store}")

    def _write_law(self, findings: Findings, files: Files) -> None:
        said = "\n".join(f"- {sentence}" for sentence in sentences(findings))
        text = f"{said}\n\nPage on the machine that ran it: `{files.page}`\n"
        self._courier.write("law", "markdown", text, description="What the numbers say")

    def _write_plot(self, findings: Findings, files: Files) -> None:
        if files.picture is not None:
            # As a data URL: Prefect's server has no place for files.
            data = base64.b64encode(files.picture.read_bytes()).decode()
            url = f"data:image/png;base64,{data}"
            self._courier.write("plot", "image", url, description="Loss by FLOPs of training")
