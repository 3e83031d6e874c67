"""A stage on Prefect's pages: its log, progress, metrics and loss curve, and its final state.

It works in a task run and in a flow run that has no tasks. All writes go through a
`BackgroundWriter`, so that a server that does not answer never slows or fails the stage.
"""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.client.schemas.objects import State
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger
from prefect.states import Completed
from prefect.utilities.context import get_task_and_flow_run_ids

from flows.building.build import Built
from flows.identity.manifest import Manifest
from flows.identity.ref import name_in, short
from flows.orchestration.client import quick_client
from flows.render.charts import charts_of
from flows.render.events import Loop, describe
from flows.render.paired import rows_of
from flows.render.text import key_of
from flows.render.vega import picture_url
from flows.stages import Stage
from infra.polling import SLOW_SECONDS
from nanochat_core.runtime.progress import read_events

SECONDS_BETWEEN_LINES = 30.0  # and pictures of progress, and requests to a silent server
_SECONDS_TO_CLOSE = 45.0
_LEVELS = {"failed": logging.ERROR, "warning": logging.WARNING}


def final_state(built: Built) -> State[Built]:
    """Return the state in which a stage's run ends; its message is the artifact's address.

    Its name is Cached if nothing was built, Resumed if the job resumed from a checkpoint, else
    Completed.
    """
    _tag_task_run(f"stage:{built.manifest.name}")
    if built.cached:
        return Completed(name="Cached", message=built.uri, data=built)
    resumed = resumed_text(built.manifest)
    if resumed is None:
        return Completed(message=built.uri, data=built)
    return Completed(name="Resumed", message=f"{resumed}; {built.uri}", data=built)


def _tag_task_run(tag: str) -> None:
    """Tag the current task run, if any; the server gets the tag with the run's next state.

    A tag that exists when a task run starts would cost up to three seconds: Prefect requests a
    concurrency slot for it and waits for the response that it has no limit.
    """
    context = TaskRunContext.get()
    if context is not None and tag not in context.task_run.tags:
        context.task_run.tags.append(tag)


class BackgroundWriter:
    """A thread that writes Prefect artifacts of the current run, one after the other.

    An artifact's key begins with the run's name, so the pages show runs of one name as versions of
    one artifact, and runs of other names separately.
    """

    def __init__(self, name: str) -> None:
        self._prefix = key_of(name)
        self._logger = get_run_logger()
        self._context = copy_context()  # Prefect's settings, which threads do not inherit
        self._task_run, self.flow_run_id = get_task_and_flow_run_ids()
        # One thread, so that writes stay in order and `_written` needs no lock.
        self._thread = ThreadPoolExecutor(1)
        self._sending: Future[None] | None = None
        self._written: dict[str, UUID] = {}
        self._silent_until = 0.0

    @property
    def is_busy(self) -> bool:
        """Return whether something is still being sent."""
        return self._sending is not None and not self._sending.done()

    def send(self, work: Callable[[SyncPrefectClient], None]) -> None:
        """Do `work` with a client, once everything sent before is done or has failed."""
        self._sending = self._thread.submit(self._context.run, self._try, work)

    def show(self, what: str, kind: str, data: Any, *, about: str, of_stage: bool = False) -> None:
        """Create this run's artifact of that key, or update it.

        Args:
            what: End of its key.
            kind: markdown, table, progress or image.
            data: A callable returns it, in the background.
            about: Its description.
            of_stage: In a task run, only the page of the task run shows it, not that of the run.
        """
        self.send(lambda client: self._write(client, what, kind, data, about, of_stage))

    def remove(self, what: str) -> None:
        """Delete this run's artifacts of that key, also those of its earlier executions."""
        self.send(lambda client: self._delete(client, what))

    def _delete(self, client: SyncPrefectClient, what: str) -> None:
        of_flow_run = ArtifactFilterFlowRunId(any_=[self.flow_run_id] if self.flow_run_id else [])
        key = ArtifactFilterKey(any_=[self._key_of(what)])
        chosen = ArtifactFilter(key=key, flow_run_id=of_flow_run)
        for artifact in client.read_artifacts(artifact_filter=chosen):
            client.delete_artifact(artifact.id)
        self._written.pop(what, None)

    def tag_flow_run(self, *runs: str) -> None:
        """Tag the flow run with the ids of these runs, as their remote stages are."""

        def tag(client: SyncPrefectClient) -> None:
            found = self.flow_run_id
            assert found is not None  # only flows have runs
            # The update replaces all tags, so it includes those that the flow run has.
            tags = {*client.read_flow_run(found).tags, *(f"run:{run}" for run in runs)}
            client.update_flow_run(found, tags=tags)

        self.send(tag)

    def _write(
        self,
        client: SyncPrefectClient,
        what: str,
        kind: str,
        data: Any,
        about: str,
        of_stage: bool,
    ) -> None:
        data = data() if callable(data) else data
        if kind == "table":
            data = json.dumps(data)  # the pages read a table's rows from text
        if what in self._written:
            # Not Prefect's `update_artifact`: it also emits all data as an event, which is stored.
            change = ArtifactUpdate(data=data, description=about)
            client.request(
                "PATCH",
                "/artifacts/{id}",
                json=change.model_dump(mode="json", exclude_unset=True),
                path_params={"id": self._written[what]},
            )
            return
        is_on_page = not (of_stage and self._task_run)
        if is_on_page:
            self._delete(client, what)  # after Retry the page has that of the execution before
        made = client.create_artifact(
            ArtifactCreate(
                key=self._key_of(what),
                type=kind,
                data=data,
                description=about,
                task_run_id=self._task_run,
                flow_run_id=self.flow_run_id if is_on_page else None,
            )
        )
        self._written[what] = made.id

    def _key_of(self, what: str) -> str:
        return f"{self._prefix}-{key_of(what)}"

    def close(self) -> None:
        """Wait until everything is sent or has failed, at most _SECONDS_TO_CLOSE."""
        # The thread is the only one, so the last work sent is the last to end.
        if self._sending is not None:
            wait([self._sending], timeout=_SECONDS_TO_CLOSE)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _try(self, work: Callable[[SyncPrefectClient], None]) -> None:
        if time.monotonic() < self._silent_until:
            return
        try:
            with quick_client() as client:
                work(client)
        except Exception as error:  # noqa: BLE001 - a page that is not written must not fail a stage
            if isinstance(error, httpx.TransportError | OSError):
                self._silent_until = time.monotonic() + SECONDS_BETWEEN_LINES
            self._logger.warning(f"not shown on Prefect's pages: {type(error).__name__}: {error}")


class StagePage:
    """The events of a stage on Prefect's pages.

    They become log lines and a progress bar; at the end a table of metrics and a picture of the
    loss.
    """

    def __init__(self, stage: Stage, *, run: str) -> None:
        """Show `stage`, which is built for the run with the id `run`."""
        self._stage = stage.name
        self._logger = get_run_logger()
        self._writer = BackgroundWriter(f"{name_in(run) or run}-{stage.name}")
        self._events: list[dict[str, Any]] = []  # with values
        self._job: Path | None = None  # its directory
        self._resumed = ""
        self._loop: Loop | None = None
        self._next_update = 0.0
        _tag_task_run(f"run:{run}")
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES

    def report(self, event: Mapping[str, Any]) -> None:
        """Show one event."""
        text = describe(event)
        if text is not None:
            self._log(text, _LEVELS.get(event["kind"], logging.INFO))
        if event["kind"] in ("step", "eval"):
            self._events.append({**event})
        match event["kind"]:
            case "building":
                # The task run starts without this tag: the fingerprint follows from the inputs.
                self._job = Path(event["directory"])
                _tag_task_run(f"stage:{self._stage}/{short(event['fingerprint'])}")
            case "start":
                self._start(event)
            case "step":
                self._step(event)
            case "finished":
                self._finish(event)
            case "failed":
                self._fail(event)
            case "interrupted" if self._loop is not None:
                self._show_progress(self._loop, f"interrupted at {self._loop}")
            case _:
                pass

    def close(self) -> None:
        """Wait until everything is sent or has failed."""
        self._writer.close()

    def _log(self, text: str, level: int = logging.INFO) -> None:
        """Log with the stage's name, since the page of a run mixes the lines of all its stages."""
        self._logger.log(level, f"{self._stage}: {text}")

    def _start(self, event: Mapping[str, Any]) -> None:
        loop = self._loop = Loop.of(event)
        if event["resumed"]:
            self._resumed = f"resumed at {loop}; "
            self._read_earlier()
        self._show_progress(loop, f"{self._resumed}{loop}")

    def _read_earlier(self) -> None:
        if self._job is not None:
            with contextlib.suppress(OSError):
                self._events[:0] = read_events(self._job / "events.jsonl")

    def _step(self, event: Mapping[str, Any]) -> None:
        loop, now = self._loop, time.monotonic()
        if loop is None:
            return
        loop.move(event)
        if is_line := now >= self._next_line:
            self._next_line = now + SECONDS_BETWEEN_LINES
            self._log(loop.line)
        # Updates are dropped while the last one is being sent: a slow server must not queue them.
        if (is_line or now >= self._next_update) and not self._writer.is_busy:
            self._next_update = now + SLOW_SECONDS
            self._show_progress(loop, self._resumed + loop.line)
            if is_line:
                self._show_curve()

    def _show_progress(self, loop: Loop, text: str) -> None:
        # On the page of the whole run too, until the stage has finished.
        self._writer.show("progress", "progress", loop.percent, about=f"{self._stage}: {text}")

    def _finish(self, event: Mapping[str, Any]) -> None:
        if self._loop is not None:
            self._writer.remove("progress")
        if rows := metric_rows(event["metrics"]):
            about = f"What {self._stage} measured at its end."
            self._writer.show("metrics", "table", rows, about=about, of_stage=True)
        self._show_curve()

    def _fail(self, event: Mapping[str, Any]) -> None:
        for part in (event["log_tail"], event.get("hint")):
            if part:
                self._log(part, logging.ERROR)

    def _show_curve(self) -> None:
        charts = charts_of(self._stage, self._events)
        shown = [chart for chart in charts if len(chart.curves[0]) > 1]
        titles = ", ".join(chart.quantity.title for chart in shown)
        if shown:
            self._writer.show(
                "curve",
                "image",
                lambda: picture_url(chart.panel for chart in shown),
                about=f"{titles}, step by step.",
                of_stage=True,
            )


_INTERVAL = "95 % interval"


def metric_rows(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each metric; a column of intervals if at least one metric has one."""
    rows = rows_of(metrics)
    has_intervals = any(between for _, _, between in rows)
    return [
        {"metric": name, "value": _rounded(value)} | ({_INTERVAL: between} if has_intervals else {})
        for name, value, between in rows
    ]


def _rounded(value: Any) -> Any:
    """Round a float to 6 significant digits; return everything else unchanged."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def resumed_text(manifest: Manifest) -> str | None:
    """Return the step at which the job's last execution resumed; None if it began at the start."""
    segments = manifest.provenance.segments
    if not segments or not segments[-1]["first_step"]:
        return None
    return f"resumed at step {segments[-1]['first_step']}/{segments[-1]['last_step']}"
