"""Which stages are worth another attempt, and when: those that were lost, not those that are wrong.

Lost is what the machine did: a killed process, a hang, a node that was taken, a store that did not
answer. It is tried again after a pause, and goes on from the last checkpoint. What a person must
mend, and an error of the code, would only come again.
"""

import re
from collections.abc import Mapping
from typing import Any

from flows.leases.lease import LeaseLost
from infra.launch.torchrun import JobFailed, StageInterrupted
from infra.storage.base import StoreUnavailable
from nanochat_core.errors import StageError

# Without coming further than before. What is lost more often than this has another fault.
# On several nodes it is, with the pauses, also how long a store may be away: some three minutes.
RETRIES = 5
MOST_LOSSES = 1000  # of one stage in one run, however far it comes
FIRST_PAUSE = 5.0  # seconds before the first new attempt
LONGEST_PAUSE = 60.0
_GROWTH = 3.0

# A rank that is killed is missed by the others: their errors are written, not its own.
_OF_MACHINES = {
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
_RUNTIME_ERROR_OF_MACHINES = re.compile(r"\b(gloo|nccl|cuda error|connection|socket)\b", re.I)


class TransientStageError(StageError):
    """Whoever was to build the stage is gone; what was saved is used by the next one."""


def is_retryable(error: object) -> bool:
    """Whether another attempt may end otherwise though nobody mends anything."""
    if isinstance(error, JobFailed):
        return _is_of_machine(error)
    return isinstance(error, TransientStageError | LeaseLost | StageInterrupted | StoreUnavailable)


def pause_before(attempt: int) -> float:
    """Seconds to wait before an attempt; 2 is the first that is not the first."""
    if attempt < 2:
        return 0.0
    return min(FIRST_PAUSE * _GROWTH ** (attempt - 2), LONGEST_PAUSE)


class RetryBudget:
    """How often a stage of a run may still be lost.

    A loss after a step that no attempt had reached before counts as the first: on machines that are
    taken once a day a stage may train for weeks. One that always ends at the same step may not.
    """

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self._losses = 0  # in a row, without coming further
        self._counted = 0  # the last attempt that was lost
        self._step = self._best = 0

    @property
    def pause(self) -> float:
        """Seconds to wait before the next attempt."""
        return pause_before(self._losses + 1)

    def note(self, event: Mapping[str, Any]) -> None:
        """One of the stage's events, which may say how far it is."""
        if event["kind"] in ("start", "step"):
            self._step = max(self._step, event["step"])

    def lose(self, attempt: int) -> bool:
        """Attempt number `attempt`, from 1, was lost; whether another one is due."""
        if attempt != self._counted:
            self._counted = attempt
            self._losses = 1 if self._step > self._best else self._losses + 1
            self._best = self._step
        return self._losses <= self._retries


def _is_of_machine(error: JobFailed) -> bool:
    if error.cause is None:  # killed, or it stood still
        return True
    if error.cause == "RuntimeError":
        return bool(_RUNTIME_ERROR_OF_MACHINES.search(str(error)))
    return error.cause in _OF_MACHINES
