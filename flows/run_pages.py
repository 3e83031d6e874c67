"""What Prefect's page of a whole run shows: its plan, scores, curves, artifacts and report card.

Everything is written in the background by a `Courier`; what cannot be shown costs nothing else.
"""

from collections.abc import Mapping

from flows.build import Built
from flows.plan import Plan
from flows.plan_text import render
from flows.run_text import (
    artifacts_text,
    curves_text,
    plan_rows,
    read_curves,
    read_scores,
    score_rows,
)
from flows.runs import Run
from flows.shown import Courier, name_of
from infra.storage.base import Store

MOST_TEXT = 200_000  # bytes of markdown; more makes Prefect's pages slow


class RunPages:
    """The artifacts of the flow run that it is made in. Close it when the run ends."""

    def __init__(self, run: Run, store: Store) -> None:
        self._run = run
        self._store = store
        self._courier = Courier(name_of(run.run))
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
