"""What Prefect's pages show of a stage while it is built, and the state that it ends in.

It works in a task run and in a flow run that has no tasks. Whatever is written goes through a
`BackgroundWriter`: a server that does not answer costs the picture and never the stage.
"""

import contextlib
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.objects import State
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger
from prefect.states import Completed
from prefect.utilities.context import get_task_and_flow_run_ids

from flows.artifacts.runs import name_in
from flows.build.build import Built
from flows.identity.fingerprint import short
from flows.identity.manifest import Manifest
from flows.orchestration.client import quick_client
from flows.render.loss_curve import LossCurves, can_draw, mermaid, png_url
from flows.render.terminal import describe, duration, number
from flows.render.text import escaped, key_of, percent
from flows.stages import Stage
from nanochat_core.runtime.progress import read_events

SECONDS_BETWEEN_UPDATES = 5.0  # of the progress bar; the pages look every half minute
SECONDS_BETWEEN_LINES = 30.0  # of progress in the log
SECONDS_BETWEEN_PICTURES = 60.0
_SECONDS_OF_SILENCE = 30.0  # after the server did not answer, which took as long to find out
_SECONDS_TO_CLOSE = 45.0
_LEVELS = {"failed": logging.ERROR, "warning": logging.WARNING}


def final_state(built: Built) -> State[Built]:
    """How a stage's run ends: its name says what was done, its message where the artifact is.

    Cached when nothing was, Resumed when the job went on from a checkpoint, else Completed.
    """
    _tag_task_run(f"stage:{built.manifest.name}")
    if built.cached:
        return Completed(name="Cached", message=built.uri, data=built)
    resumed = resumed_text(built.manifest)
    if resumed is None:
        return Completed(message=built.uri, data=built)
    return Completed(name="Resumed", message=f"{resumed}; {built.uri}", data=built)


def name_of(run: str) -> str:
    """What the run with this id is called; an id given by hand is a name."""
    return name_in(run) or run


def _tag_task_run(tag: str) -> None:
    """Tag the task run, if we are in one; the server learns of it with the run's next state.

    A tag that is there when a task run starts costs up to three seconds: Prefect asks the server
    for a slot of it, and waits for the answer that there is no limit.
    """
    context = TaskRunContext.get()
    if context is not None and tag not in context.task_run.tags:
        context.task_run.tags.append(tag)


class BackgroundWriter:
    """Writes the artifacts of the run that it is made in, one after the other, in a thread.

    An artifact's key begins with the run's name: so the pages tell the runs of one name as versions
    of one artifact, and keep those of other names apart.
    """

    def __init__(self, name: str) -> None:
        self._prefix = key_of(name)
        self._logger = get_run_logger()
        self._context = copy_context()  # in which Prefect looks up its settings and its client
        self._task_run, self.flow_run_id = get_task_and_flow_run_ids()
        self._thread = ThreadPoolExecutor(1)
        self._sending: Future[None] | None = None
        self._written: dict[str, UUID] = {}
        self._silent_until = 0.0
        self._client: SyncPrefectClient | None = None

    @property
    def is_busy(self) -> bool:
        """Whether something is still on its way."""
        return self._sending is not None and not self._sending.done()

    def send(self, work: Callable[[], None]) -> None:
        """Do `work`, which may call `write`, when everything sent before is done or given up."""
        self._sending = self._thread.submit(self._context.run, self._try, work)

    def write(self, what: str, kind: str, data: Any, *, description: str = "") -> None:
        """Create this run's artifact of that key, or change the one that was created before.

        `kind`: markdown, table, progress or image. Only from within `send`.
        """
        if kind == "table":
            data = json.dumps(data)  # the pages read a table's rows from text
        if what in self._written:
            # Not `update_artifact`, which sends all of it once more, as an event that is kept.
            change = ArtifactUpdate(data=data, description=description)
            self.client.request(
                "PATCH",
                "/artifacts/{id}",
                json=change.model_dump(mode="json", exclude_unset=True),
                path_params={"id": self._written[what]},
            )
            return
        made = self.client.create_artifact(
            ArtifactCreate(
                key=f"{self._prefix}-{key_of(what)}",
                type=kind,
                data=data,
                description=description,
                task_run_id=self._task_run,
                flow_run_id=self.flow_run_id,
            )
        )
        self._written[what] = made.id

    @property
    def client(self) -> SyncPrefectClient:
        """Prefect's client. Only from within `send`."""
        assert self._client is not None
        return self._client

    def close(self) -> None:
        """Wait until everything is sent, or given up."""
        if self._sending is not None:
            wait([self._sending], timeout=_SECONDS_TO_CLOSE)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _try(self, work: Callable[[], None]) -> None:
        if time.monotonic() < self._silent_until:
            return
        try:
            with quick_client() as self._client:
                work()
        except Exception as error:  # noqa: BLE001 - what is shown of a stage is less than the stage
            if isinstance(error, httpx.TransportError | OSError):
                self._silent_until = time.monotonic() + _SECONDS_OF_SILENCE
            self._logger.warning(f"not shown on Prefect's pages: {type(error).__name__}: {error}")


@dataclass(kw_only=True)
class _Loop:
    """The loop that the stage is in."""

    unit: str
    first: int  # step at which this execution began
    began: float
    text: str  # how far it is, and how it goes

    def left(self, step: int, total: int) -> float | None:
        """Seconds, or None before anything is known."""
        done = step - self.first
        return (total - step) * (time.monotonic() - self.began) / done if done > 0 else None


class StagePage:
    """A stage's events as Prefect shows them.

    Log lines; a progress bar that says how far the stage is; at the end a table of its metrics and
    a picture of its loss; when it fails, a page that says why and what to do.
    """

    def __init__(self, stage: Stage, *, run: str) -> None:
        """`run`: the id of the run that the stage is built for."""
        self._stage = stage.name
        self._logger = get_run_logger()
        self._courier = BackgroundWriter(f"{name_of(run)}-{stage.name}")
        self._curves = LossCurves(stage.name)
        self._job: Path | None = None  # its directory
        self._resumed = ""
        self._loop: _Loop | None = None
        self._next_update = 0.0
        _tag_task_run(f"run:{run}")
        self._percent = 0.0
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
        self._next_picture = time.monotonic() + SECONDS_BETWEEN_PICTURES

    def report(self, event: Mapping[str, Any]) -> None:
        """Pass on one event."""
        text = describe(event)
        if text is not None:
            self._log(text, _LEVELS.get(event["kind"], logging.INFO))
        self._curves.add(event)
        match event["kind"]:
            case "building":
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
                self._show_progress(f"interrupted at {self._loop.text}")
            case _:
                pass

    def close(self) -> None:
        """Wait until everything is sent, or given up."""
        self._courier.close()

    def _log(self, text: str, level: int = logging.INFO) -> None:
        """With the stage's name: the page of a run shows the lines of all its stages together."""
        self._logger.log(level, f"{self._stage}: {text}")

    def _start(self, event: Mapping[str, Any]) -> None:
        step, total, unit = event["step"], event["total"], event["unit"]
        text = f"{unit} {step:,} of {total:,}"
        self._loop = _Loop(unit=unit, first=step, began=time.monotonic(), text=text)
        if event["resumed"]:
            self._resumed = f"resumed at {text}; "
            self._read_earlier()
        self._percent = _percent(event)
        self._show_progress(self._resumed + text)

    def _read_earlier(self) -> None:
        if self._job is not None:
            with contextlib.suppress(OSError):
                self._curves.add_earlier(read_events(self._job / "events.jsonl"))

    def _step(self, event: Mapping[str, Any]) -> None:
        loop, now = self._loop, time.monotonic()
        if loop is None:
            return
        step, total = event["step"], event["total"]
        self._percent = _percent(event)
        loop.text = progress_text(event["values"], unit=loop.unit, step=step, total=total)
        left = loop.left(step, total)
        text = f"{loop.text}, {duration(left)} left" if left else loop.text
        if now >= self._next_line:
            self._next_line = now + SECONDS_BETWEEN_LINES
            self._log(text)
        if now >= self._next_update and not self._courier.is_busy:
            self._next_update = now + SECONDS_BETWEEN_UPDATES
            self._show_progress(self._resumed + text)
            if now >= self._next_picture:
                self._next_picture = now + SECONDS_BETWEEN_PICTURES
                self._show_curve()

    def _show_progress(self, text: str) -> None:
        description, percent = f"{self._stage}: {text}", self._percent
        self._courier.send(
            lambda: self._courier.write("progress", "progress", percent, description=description)
        )

    def _finish(self, event: Mapping[str, Any]) -> None:
        if self._loop is not None:
            self._percent = 100.0
            self._show_progress(f"{self._resumed}finished at {self._loop.text}")
        if rows := metric_rows(event["metrics"]):
            self._courier.send(
                lambda: self._courier.write("metrics", "table", rows, description=event["uri"])
            )
        self._show_curve()

    def _fail(self, event: Mapping[str, Any]) -> None:
        for part in (event["log_tail"], event.get("hint")):
            if part:
                self._log(part, logging.ERROR)
        last_seen = self._loop.text if self._loop is not None else None
        text = failure_text(self._stage, event, last_seen=last_seen)
        self._courier.send(
            lambda: self._courier.write("failure", "markdown", text, description=event["error"])
        )

    def _show_curve(self) -> None:
        shown = self._curves.shown()
        titles = ", ".join(quantity.title for quantity, _ in shown)

        def draw() -> None:
            kind, data = ("image", png_url(shown)) if can_draw() else ("markdown", mermaid(shown))
            self._courier.write("curve", kind, data, description=f"{self._stage}: {titles}")

        if shown:
            self._courier.send(draw)


def _percent(event: Mapping[str, Any]) -> float:
    return 100.0 * event["step"] / max(event["total"], 1)


_MOST_LOG = 20_000  # characters of a log's end
_MOST_VALUES = 4  # of a step
_INTERVAL = "95 % interval"


def progress_text(values: Mapping[str, Any], *, unit: str, step: int, total: int) -> str:
    """Where a loop is: "step 120 of 320, loss 3.21, 4,887 tokens/s"."""
    numbers = [(name, value) for name, value in values.items() if type(value) in (int, float)]
    shown = [_value(name, value) for name, value in numbers[:_MOST_VALUES]]
    return ", ".join([f"{unit} {step:,} of {total:,}", *shown])


def _value(name: str, value: float) -> str:
    match name:
        case "tokens_per_second":
            return f"{value:,.0f} tokens/s"
        case "mfu":
            return f"{percent(value)} MFU"
        case "seconds":
            return f"{duration(value)} a step"
        case _:
            return f"{name.replace('_', ' ')} {number(value)}"


def metric_rows(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each metric, with its interval where at least one has one."""
    ends = {f"{name}_{end}" for name in metrics for end in ("low", "high")}
    rows = [
        {"metric": name, "value": _rounded(value), _INTERVAL: _interval(metrics, name)}
        for name, value in metrics.items()
        if name not in ends
    ]
    if not any(row[_INTERVAL] for row in rows):
        for row in rows:
            del row[_INTERVAL]
    return rows


def _interval(metrics: Mapping[str, Any], name: str) -> str:
    low, high = (metrics.get(f"{name}_{end}") for end in ("low", "high"))
    return "" if low is None or high is None else f"{number(low)} to {number(high)}"


def _rounded(value: Any) -> Any:
    """A number with as many digits as anybody reads; everything else as it is."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def failure_text(stage: str, event: Mapping[str, Any], *, last_seen: str | None) -> str:
    """What is known of a failure: `event` is of kind `failed`, `last_seen` how far it was."""
    parts = [f"# {stage} failed", fenced(event["error"])]
    if last_seen is not None:
        parts.append(f"It was last seen at {last_seen}.")
    if hint := event.get("hint"):
        parts += ["**What to do**", fenced(hint.replace("; ", "\n"))]  # lines are not folded
    if event["log_tail"]:
        parts += ["**The end of the failing rank's log**", fenced(event["log_tail"][-_MOST_LOG:])]
    parts.append(
        "Finished stages and saved checkpoints are kept: *Retry* on the flow run's page, or the "
        "same run started again, goes on from there."
    )
    return "\n\n".join(parts) + "\n"


def resumed_text(manifest: Manifest) -> str | None:
    """From where the job's last execution went on; None when it did all by itself."""
    segments = manifest.provenance.segments
    if not segments or not segments[-1]["first_step"]:
        return None
    return f"resumed at step {segments[-1]['first_step']} of {segments[-1]['last_step']}"


def fenced(text: str) -> str:
    """`text`, with what is invisible made visible, in a block that nothing in it can close."""
    shown = escaped(text)
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{shown}\n{fence}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
