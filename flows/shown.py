"""What Prefect's pages show of a stage while it is built: log lines, a progress bar, metrics."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any
from uuid import UUID

import httpx
from prefect.artifacts import (
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.exceptions import PrefectException
from prefect.logging import get_run_logger

from flows.display import describe
from flows.stages import Stage

SECONDS_BETWEEN_UPDATES = 5.0
_LEVELS = {"failed": "error", "warning": "warning"}
_NOT_ANSWERING = (httpx.HTTPError, PrefectException, OSError)


class Reporter:
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
