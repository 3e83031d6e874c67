"""The body of every Prefect task: `flows.build`, told to Prefect.

Prefect's own result cache is off: whether a stage is up to date is decided by its artifact alone. A
reused stage ends in a state named Cached with the artifact's address as its message.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from typing import Any
from uuid import UUID

import httpx
from prefect import task
from prefect.artifacts import (
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger
from prefect.states import Completed
from prefect.utilities.annotations import quote

from flows.build import Built, Site, build
from flows.display import describe
from flows.stages import Stage

SECONDS_BETWEEN_UPDATES = 5.0
_LEVELS = {"failed": "error", "warning": "warning"}
_NOT_ANSWERING = (httpx.HTTPError, PrefectException, OSError)


@task(name="stage", cache_policy=NO_CACHE, persist_result=False, retries=0)
def stage_task(stage: Stage, site: Site, inputs: dict[str, Built], *, force: bool) -> State[Built]:
    """Build `stage`, or find that it exists. Raises what `flows.build.build` raises."""
    reporter = _Reporter(stage)
    manifests = {name: built.manifest for name, built in inputs.items()}

    def watch(name: str, event: dict[str, Any]) -> None:
        site.watch(name, event)
        reporter.report(event)

    with contextlib.closing(reporter):
        built = build(stage, replace(site, watch=watch), manifests, force=force)
    name = "Cached" if built.cached else "Completed"
    return Completed(name=name, message=built.uri, data=built)


def submit(stage: Stage, site: Site, inputs: Mapping[str, Any], *, force: bool) -> Any:
    """Start `stage` once the futures in `inputs` are there; returns its own future."""
    # No tags: for each one Prefect asks the server for a slot, and may wait two seconds to hear
    # that there is no limit. It types `submit` as taking values, not futures or quoted ones.
    named: Any = stage_task.with_options(name=stage.name, task_run_name=stage.name)
    return named.submit(quote(stage), quote(site), dict(inputs), force=force)


class _Reporter:
    """Events as Prefect shows them: log lines, a progress bar, a table of final metrics.

    The bar is moved by a thread of its own: a server that does not answer is tried again for half a
    minute, in which the stage's supervisor must not stand still.
    """

    def __init__(self, stage: Stage) -> None:
        self._key = stage.name.replace("_", "-")
        self._logger = get_run_logger()
        self._context = copy_context()  # Prefect looks up in it which task run speaks
        self._courier = ThreadPoolExecutor(1)
        self._sending: Future[None] | None = None
        self._bar: UUID | None = None
        self._next_update = 0.0

    def report(self, event: Mapping[str, Any]) -> None:
        """Pass on one event."""
        text = describe(event)
        if text is not None:
            getattr(self._logger, _LEVELS.get(event["kind"], "info"))(text)
        if event["kind"] == "failed" and event["log_tail"]:
            self._logger.error(event["log_tail"])
        if event["kind"] == "step":
            self._move_bar(100.0 * event["step"] / max(event["total"], 1))
        elif event["kind"] == "finished":
            self._send(self._finish, event["metrics"])

    def close(self) -> None:
        """Wait until everything is sent, or given up."""
        self._courier.shutdown()

    def _move_bar(self, percent: float) -> None:
        now = time.monotonic()
        is_busy = self._sending is not None and not self._sending.done()
        if now >= self._next_update and not is_busy:
            self._next_update = now + SECONDS_BETWEEN_UPDATES
            self._send(self._update, percent)

    def _send(self, message: Callable[[Any], None], value: Any) -> None:
        self._sending = self._courier.submit(self._context.run, self._try, message, value)

    def _try(self, message: Callable[[Any], None], value: Any) -> None:
        try:
            message(value)
        except _NOT_ANSWERING as error:  # costs the bar and nothing else
            self._logger.warning(f"progress is not shown: {error}")

    def _update(self, percent: float) -> None:
        if self._bar is None:
            self._bar = _id(create_progress_artifact(percent, key=f"progress-{self._key}"))
        else:
            update_progress_artifact(self._bar, percent)

    def _finish(self, metrics: Mapping[str, Any]) -> None:
        if self._bar is not None:
            update_progress_artifact(self._bar, 100.0)
        if metrics:
            rows = [{"metric": name, "value": value} for name, value in metrics.items()]
            create_table_artifact(rows, key=f"metrics-{self._key}")


def _id(artifact: Any) -> UUID:
    """Prefect types what it returns as a coroutine too."""
    return artifact
