"""Gangs: machines that a scheduler starts together, restarts together, and ends together."""

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from nanochat_core.errors import StageError

SECONDS = 60.0  # for an answer of the scheduler; a busy one takes many
# queued: waits for machines, perhaps again. finished: every process ended with exit code 0.
Phase: TypeAlias = Literal["queued", "running", "finished", "failed", "cancelled"]


class GangError(StageError):
    """The scheduler refuses a request."""


class SchedulerUnavailable(GangError):
    """The scheduler does not answer; the same request may succeed later."""


@dataclass(frozen=True, kw_only=True)
class GangSpec:
    """The gang to start: one process of `nanochat` with `words` on each of `nodes` machines."""

    name: str  # at most 44 of a-z, 0-9 and -: a label of DNS, with room for the number of a pod
    nodes: int
    gpus: int | None  # of each machine; None: what the scheduler's template says
    words: tuple[str, ...]
    store: str


@dataclass(frozen=True, kw_only=True)
class GangState:
    """A gang's state, as the scheduler reports it."""

    phase: Phase
    text: str  # its own words: "PENDING (Resources)"
    exit_code: int | None = None  # of a gang that failed; None: unknown


class Gangs(Protocol):
    """A scheduler. Its methods raise GangError."""

    def find(self, name: str) -> str | None:
        """Return the id of the gang of this name that waits or runs, or None."""
        ...

    def submit(self, spec: GangSpec) -> str:
        """Submit a gang and return its id. Two of one name never run at the same time."""
        ...

    def describe(self, gang: str) -> str:
        """Return the scheduler's name of a gang, and the command that shows it."""
        ...

    def state(self, gang: str) -> GangState:
        """Return a gang's state."""
        ...

    def cancel(self, name: str) -> None:
        """Stop all gangs of this name: processes get SIGTERM, and are not restarted. Idempotent."""
        ...

    def logs(self, gang: str, after: str) -> tuple[list[str], str]:
        """Return its new lines, and the value of `after` for the next call; "" begins."""
        ...
