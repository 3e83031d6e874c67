"""Processes of a stack: restarted when they end, and ended when the stack does.

Every process that a worker starts, at any depth, is found by a variable in its environment. One
that lost its worker or its run gets the time to save, and is then killed.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import psutil

from infra.polling import wait_until
from infra.prefect.logs import spawn
from infra.prefect.server import SECONDS_TO_DIE
from infra.retry import after_failure

SECONDS_TO_SAVE = 30.0  # a stage needs less to save and to publish its checkpoint
STACK = "NANOCHAT_STACK"  # the home; marks a supervisor's workers and all that they start
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
        self.tries = 0  # that ended in quick succession
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
            self.tries = 0
        self.tries += 1
        pause = after_failure(self.tries)
        self._not_before = now + pause
        return pause


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
    def early_ends(self) -> int:
        """The number of ends in quick succession, the last one included."""
        return self._pause.tries

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

    def signal(self, *numbers: signal.Signals) -> None:
        """Send signals to the process, if it lives."""
        if self._process is not None:
            for number in numbers:
                self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process and its process group."""
        # The command leads a session, so its group has its pid and all of its children.
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def marked(home: Path) -> dict[psutil.Process, str]:
    """Return the live processes of the home's workers, and of all that these started, less this.

    Each with the id of its flow run; "" for a process of no run.
    """
    found: dict[psutil.Process, str] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            is_ours = environment.get(STACK) == str(home) and process.pid != os.getpid()
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found[process] = environment.get(_FLOW_RUN, "")
    return found


class Leftovers:
    """Processes that lost their worker or their run: runs, and ranks that still save or hang."""

    def __init__(self) -> None:
        self._ends: dict[psutil.Process, float] = {}  # monotonic seconds after which each is killed

    def end(
        self,
        processes: Iterable[psutil.Process],
        *,
        owners: Collection[int] = (),
        seconds: float = SECONDS_TO_SAVE,
    ) -> int:
        """Ask those of `processes` that have no owner to end; return how many there are.

        `owners` are pids, which own themselves and all of their descendants. Never blocks: each
        process is asked when it is first seen, and killed by a call that comes `seconds` later.
        With a lower number a later call shortens the time.
        """
        now = time.monotonic()
        left = [process for process in processes if not _is_owned(process, owners)]
        for process in left:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if process not in self._ends:
                    _ask_to_end(process)
                elif now >= min(self._ends[process], now + seconds):
                    process.kill()
        self._ends = {process: self._ends.get(process, now + seconds) for process in left}
        return len(left)


def end_leftovers(home: Path, *, seconds: float = SECONDS_TO_SAVE) -> int:
    """End the processes that workers of an earlier supervisor left; return their number."""
    leftovers = Leftovers()
    number = leftovers.end(marked(home), seconds=seconds)
    wait_until(
        lambda: not leftovers.end(marked(home), seconds=seconds), seconds=seconds + SECONDS_TO_DIE
    )
    return number


def _ask_to_end(process: psutil.Process) -> None:
    """Send SIGTERM to the process group of a run, if this process leads one.

    A flow's threads do not pass a signal on; the children of a leader are notified by it.
    """
    if _FLOW_RUN in process.environ() and os.getpgid(process.pid) == process.pid:
        os.killpg(process.pid, signal.SIGTERM)


def _is_owned(process: psutil.Process, owners: Collection[int]) -> bool:
    try:
        return any(one.pid in owners for one in (process, *process.parents()))
    except psutil.Error:
        return True  # it has just ended: seen again next time if not
