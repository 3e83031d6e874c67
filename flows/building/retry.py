"""Retry policy of stages: which errors are retryable, the pauses, and the retry budget.

Retryable is what the machine did: a killed process, a hang, a preempted node, a lack of memory that
a smaller device batch may end, a store that did not respond. The stage is retried after a pause and
resumes from the last checkpoint. Errors that a person must fix, and errors of the code, would only
be raised again.
"""

import re
from collections.abc import Mapping
from typing import Any

from flows.leases.held_lease import LeaseLost
from infra.launch.torchrun import JobFailed, StageInterrupted
from infra.retry import after_failure
from infra.storage.base import StoreUnavailable
from nanochat_core.errors import OutOfMemory, StageError

PATIENCE = 3600.0  # seconds without an answer of Prefect or a scheduler; they build meanwhile
MAX_RETRIES = 1000  # retries of one stage in one run, however far it gets

# Types of exceptions, by name: a worker reports its error as text. A killed rank writes none; what
# is reported is how the other ranks' collectives fail.
MACHINE_FAULTS = {
    "AcceleratorError",
    "BrokenPipeError",
    "ConnectionError",
    "ConnectionRefusedError",
    "ConnectionResetError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "TimeoutError",
}
# gloo and NCCL raise plain RuntimeError, so only the message shows that the machine is the cause.
_RUNTIME_ERROR_OF_MACHINES = re.compile(r"\b(gloo|nccl|cuda error|connection|socket)\b", re.I)


class TransientStageError(StageError):
    """The builder of a stage was lost; a retry resumes from what it saved."""


def is_retryable(error: object) -> bool:
    """Return whether another attempt may succeed without a change to code or settings."""
    if isinstance(error, JobFailed):
        return _is_of_machine(error)
    transient = (TransientStageError, LeaseLost, OutOfMemory, StageInterrupted, StoreUnavailable)
    return isinstance(error, transient)


class RetryBudget:
    """The retries that a stage of a run has left.

    A failure after a step that no earlier attempt reached counts as the first one: on machines that
    are preempted once a day a stage may train for weeks, but not fail at the same step for ever.
    """

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self._losses = 0  # in a row, without a new step
        self._step = self._best = 0

    @property
    def pause(self) -> float:
        """Return the seconds to wait before the next attempt: 0 before the first."""
        return after_failure(self._losses)

    def note(self, event: Mapping[str, Any]) -> None:
        """Take the step from one of the stage's events, if it has one."""
        if event["kind"] in ("start", "step"):
            self._step = max(self._step, event["step"])

    def lose(self) -> bool:
        """Count an attempt as lost; return whether to retry."""
        self._losses = 1 if self._step > self._best else self._losses + 1
        self._best = self._step
        return self._losses <= self._retries


def _is_of_machine(error: JobFailed) -> bool:
    if error.cause is None:  # killed, or ended by the watchdog after a hang
        return True
    if error.cause == "RuntimeError":
        return bool(_RUNTIME_ERROR_OF_MACHINES.search(str(error)))
    return error.cause in MACHINE_FAULTS
