"""Find and end processes that outlive their parent.

A worker that is killed leaves the processes of its runs, and these, when killed, leave ranks that
still save. The keeper inherits them, or finds them by a variable in their environment. Each gets
the time to save, and is then killed.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

SECONDS_TO_SAVE = 30.0  # a stage needs less to save and to publish its checkpoint
STACK = "NANOCHAT_STACK"  # the home; marks every process that a keeper's workers started
_FLOW_RUN = "PREFECT__FLOW_RUN_ID"
_PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)


class Attempt:
    """One flow run's process on this machine: the leader of a session and a process group."""

    def __init__(self, process: psutil.Process, flow_run: str) -> None:
        self.process = process
        self.flow_run = flow_run
        self._ends: float | None = None  # deadline, monotonic seconds; None: not asked to end

    @property
    def is_over(self) -> bool:
        """True if the process has ended."""
        # A zombie has ended, although its pid exists until its parent reaps it.
        try:
            return self.process.status() == psutil.STATUS_ZOMBIE or not self.process.is_running()
        except psutil.NoSuchProcess:
            return True

    def end(self, seconds: float) -> None:
        """Send SIGTERM on the first call, and SIGKILL once `seconds` have passed."""
        now = time.monotonic()
        if self._ends is None:
            self._ends = now + seconds
            self._signal(signal.SIGTERM)
        elif now > min(self._ends, now + seconds):
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """Signal the process group, as Prefect does: a flow's threads do not pass a signal on."""
        if not self.is_over:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


class Orphans:
    """Children that this process inherited and did not start."""

    def __init__(self) -> None:
        self._ends: dict[int, float] = {}  # pid -> when to insist, in monotonic seconds

    def look(self, *, but: Collection[int | None]) -> bool:
        """Reap those that ended, kill those past their deadline; return whether any is left."""
        now = time.monotonic()
        found = {child.pid: child for child in psutil.Process().children() if child.pid not in but}
        # The time to save begins when a child is first seen.
        self._ends = {pid: self._ends.get(pid, now + SECONDS_TO_SAVE) for pid in found}
        for pid, process in found.items():
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                if process.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(pid, os.WNOHANG)
                    del self._ends[pid]
                elif now > self._ends[pid]:
                    process.kill()
        return bool(self._ends)


def attempts_of(worker: int, known: dict[int, Attempt]) -> dict[int, Attempt]:
    """Return the worker's flow run processes by pid; reuse the `known` objects."""
    try:
        children = psutil.Process(worker).children()
    except psutil.NoSuchProcess:
        return {}
    found = ((child.pid, known.get(child.pid) or _attempt(child)) for child in children)
    return {pid: attempt for pid, attempt in found if attempt is not None}


def end_leftovers(home: Path, *, seconds: float = SECONDS_TO_SAVE) -> int:
    """End the processes that workers of an earlier keeper left; return their number.

    Runs are asked to save and end; after `seconds` all that is left is killed.
    """
    left = list(_marked(STACK, str(home)))
    # Only leaders of a process group: their children inherited the run's id, and are notified by
    # the run or by the kernel.
    attempts = [a for a in map(_attempt, left) if a is not None and _leads(a.process)]
    for attempt in attempts:
        attempt.end(seconds)
    _, alive = psutil.wait_procs(left, seconds)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, seconds)
    return len(left)


def become_subreaper() -> None:
    """Make Linux hand orphans of our workers to this process instead of to init."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _attempt(process: psutil.Process) -> Attempt | None:
    with contextlib.suppress(psutil.Error):
        if flow_run := process.environ().get(_FLOW_RUN):
            return Attempt(process, flow_run)
    return None


def _leads(process: psutil.Process) -> bool:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(process.pid) == process.pid
    return False


def _marked(variable: str, value: str) -> Iterator[psutil.Process]:
    """Yield the live processes, except this one, whose environment has this value."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_dead = process.status() == psutil.STATUS_ZOMBIE
            if process.pid == os.getpid() or is_dead:
                continue
            if process.environ().get(variable) == value:
                yield process
