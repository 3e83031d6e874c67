"""Processes of a stack: restarted when they end, and ended when the stack does.

A worker that is killed leaves the processes of its runs, and these, when killed, leave ranks that
still save. All of them are found by a variable in their environment. A run gets the time to save,
and is then killed.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection
from pathlib import Path

import psutil

from infra.prefect.logs import last_line, spawn

SECONDS_TO_SAVE = 30.0  # a stage needs less to save and to publish its checkpoint
STACK = "NANOCHAT_STACK"  # the home; marks every process that a supervisor's workers started
FIRST_PAUSE = 1.0  # seconds before the second start; doubled with each early end
LONGEST_PAUSE = 30.0
SECONDS_OF_HEALTH = 60.0  # a process that ran longer did not fail at its start
_FLOW_RUN = "PREFECT__FLOW_RUN_ID"


class Interval:
    """Something that is done every so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = 0.0

    def begins(self) -> bool:
        """Return whether another interval begins: True once, then False until it has passed."""
        if (now := time.monotonic()) < self._next:
            return False
        self._next = now + self._seconds
        return True


class Backoff:
    """The growing pause between two tries."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began = 0.0
        self._not_before = 0.0

    @property
    def is_over(self) -> bool:
        """True if the pause is over."""
        return time.monotonic() >= self._not_before

    def began(self) -> None:
        """Note that a try begins."""
        self._began = time.monotonic()

    def ended(self) -> float:
        """Note that the try ended; return the seconds until the next."""
        now = time.monotonic()
        # A long life resets the backoff: only ends in quick succession lengthen the pause.
        if now - self._began > SECONDS_OF_HEALTH:
            self._seconds = 0.0
        self._seconds = min(LONGEST_PAUSE, 2 * self._seconds or FIRST_PAUSE)
        self._not_before = now + self._seconds
        return self._seconds


class ManagedProcess:
    """One command that is started again after it ended. Its output goes to a file."""

    def __init__(
        self, name: str, command: list[str], *, output: Path, log: Callable[[str], None]
    ) -> None:
        self.since = 0.0  # unix seconds of the last start
        self.output = output
        self._name = name
        self._command = command
        self._log = log
        self._pause = Backoff()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The pid, until `ended` reports the end; None if there is no process."""
        return self._process.pid if self._process is not None else None

    @property
    def is_over(self) -> bool:
        """True if there is no live process."""
        return self._process is None or self._process.poll() is not None

    @property
    def may_start(self) -> bool:
        """True if there is no process, and the pause after the last one is over."""
        return self._process is None and self._pause.is_over

    def start(self, environment: dict[str, str]) -> None:
        """Start the command. An error is logged, and followed by a pause like an early end."""
        self._pause.began()
        self.since = time.time()
        try:
            # Not in the caller's directory: its .env would configure Prefect.
            self._process = spawn(
                self._command, log=self.output, environment=environment, cwd=self.output.parent
            )
        except OSError as error:  # no disk space or memory now: other processes continue
            self._log(f"{self._name}: {error.strerror}; again in {self._pause.ended():g} s")
        else:
            self._log(f"{self._name}: process {self._process.pid}")

    def ended(self) -> int | None:
        """Return the exit code of a process that ended, once; None while it runs."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        self._process = None  # so that the end is reported once, and `pid` is None from now on
        self._pause.ended()
        self._log(f"{self._name}: ended ({code})")
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it lives."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process and its process group."""
        # The command leads a session, so its group has its pid and all of its children.
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def last_words(self) -> str:
        """Return the last line of the output."""
        return last_line(self.output)


class Attempt:
    """One flow run's process on this machine: the leader of a session and a process group."""

    def __init__(self, process: psutil.Process, flow_run: str) -> None:
        self.process = process
        self.flow_run = flow_run
        self._deadline: float | None = None  # monotonic seconds; None: not asked to end

    @property
    def is_over(self) -> bool:
        """True if the process has ended."""
        # A zombie has ended, although its pid exists until its parent reaps it.
        try:
            return self.process.status() == psutil.STATUS_ZOMBIE or not self.process.is_running()
        except psutil.NoSuchProcess:
            return True

    def end(self, seconds: float) -> None:
        """Send SIGTERM on the first call, and SIGKILL once `seconds` have passed.

        A later call may shorten the time; with 0 it kills.
        """
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + seconds
            self._signal(signal.SIGTERM)
        elif now >= min(self._deadline, now + seconds):
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """Signal the process group, as Prefect does: a flow's threads do not pass a signal on."""
        if not self.is_over:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


def attempts_of(worker: int) -> list[Attempt]:
    """Return the flow runs whose processes a worker started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return _attempts(psutil.Process(worker).children())
    return []


def leftovers(home: Path) -> list[psutil.Process]:
    """Return the live processes that workers of the home's supervisors started, less this one."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_marked = process.environ().get(STACK) == str(home)
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


class Orphans:
    """Processes that outlived the run that started them: ranks that still save, or hang."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._ends: dict[psutil.Process, float] = {}  # monotonic seconds after which each is killed

    def look(self, owners: Collection[int]) -> None:
        """Kill those that had SECONDS_TO_SAVE; descendants of the pids `owners` are none."""
        now = time.monotonic()
        found = [process for process in leftovers(self._home) if not _is_owned(process, owners)]
        # The time to save begins when a process is first seen without an owner.
        self._ends = {process: self._ends.get(process, now + SECONDS_TO_SAVE) for process in found}
        for process in found:
            if now > self._ends[process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def _is_owned(process: psutil.Process, owners: Collection[int]) -> bool:
    try:
        return any(one.pid in owners for one in (process, *process.parents()))
    except psutil.Error:
        return True  # it has just ended: seen again next time if not


def end_leftovers(home: Path, *, seconds: float = SECONDS_TO_SAVE) -> int:
    """End the processes that workers of an earlier supervisor left; return their number.

    Runs are asked to save and end; after `seconds` all that is left is killed.
    """
    left = leftovers(home)
    # Only leaders of a process group: their children inherited the run's id, and are notified by
    # the run or by the kernel.
    for attempt in _attempts([process for process in left if _leads(process)]):
        attempt.end(seconds)
    _, alive = psutil.wait_procs(left, seconds)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, seconds)
    return len(left)


def _attempts(processes: list[psutil.Process]) -> list[Attempt]:
    found: list[Attempt] = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if flow_run := process.environ().get(_FLOW_RUN):
                found.append(Attempt(process, flow_run))
    return found


def _leads(process: psutil.Process) -> bool:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(process.pid) == process.pid
    return False
