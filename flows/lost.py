"""Which stages are worth another attempt, and when: those that were lost, not those that are wrong.

Lost is what the machine did: a killed process, a hang, a node that was taken, a store that did not
answer. It is tried again after a pause, and goes on from the last checkpoint. What a person must
mend, and an error of the code, would only come again.
"""

import re

from flows.lease import LeaseLost
from infra.launch.torchrun import JobFailed, StageInterrupted
from infra.storage.base import StoreAway
from nanochat_core.errors import StageError

# A spot machine is taken a few times a day; what is lost more often than this has another fault.
# With the pauses it is also how long a store may be away: some three minutes.
RETRIES = 5
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


class StageLost(StageError):
    """Whoever was to build the stage is gone; what was saved is used by the next one."""


def is_lost(error: object) -> bool:
    """Whether another attempt may end otherwise though nobody mends anything."""
    if isinstance(error, JobFailed):
        return _is_of_machine(error)
    return isinstance(error, StageLost | LeaseLost | StageInterrupted | StoreAway)


def pause_before(attempt: int) -> float:
    """Seconds to wait before an attempt; 2 is the first that is not the first."""
    if attempt < 2:
        return 0.0
    return min(FIRST_PAUSE * _GROWTH ** (attempt - 2), LONGEST_PAUSE)


def _is_of_machine(error: JobFailed) -> bool:
    if error.cause is None:  # killed, or it stood still
        return True
    if error.cause == "RuntimeError":
        return bool(_RUNTIME_ERROR_OF_MACHINES.search(str(error)))
    return error.cause in _OF_MACHINES
