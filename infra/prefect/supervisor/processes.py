"""Processes of a stack: restarted when they end, and ended when the stack does.

Each ends with its parent, a worker, its runs and their jobs too (PR_SET_PDEATHSIG).
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

from infra.polling import wait_until
from infra.prefect.logs import spawn
from infra.prefect.server import SECONDS_TO_DIE
from infra.retry import LONGEST_PAUSE, after_failure

SECONDS_TO_SAVE = 30.0  # a stage needs less to save and to publish its checkpoint


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
        if now - self._began > LONGEST_PAUSE:
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

    def kill(self) -> None:
        """Kill the process and its process group."""
        # The command leads a session, so its group has its pid and all of its children.
        if self._process is not None and self._process.poll() is None:
            _send(-self._process.pid, signal.SIGKILL)
            self._process.wait()


def end_workers(
    workers: Iterable[psutil.Process], *, is_urgent: Callable[[], bool] = lambda: False
) -> None:
    """End the runs of these workers, which save, and then the workers.

    Returns when all of them have ended; what does not end in time, or at once if it `is_urgent`, is
    killed.
    """
    workers = list(workers)
    # Runs before workers: a worker that ends first kills its runs before they have saved. One that
    # is suspended takes no other run, since SIGTERM is pending when it is woken.
    for worker in workers:
        _send(worker.pid, signal.SIGSTOP)
    runs = [run for worker in workers for run in _children(worker)]
    _end_groups(runs, SECONDS_TO_SAVE, is_urgent)
    for worker in workers:
        _send(worker.pid, signal.SIGTERM)
        _send(worker.pid, signal.SIGCONT)
    _end_groups(workers, SECONDS_TO_DIE, is_urgent)


def _end_groups(
    leaders: Sequence[psutil.Process], seconds: float, is_urgent: Callable[[], bool]
) -> None:
    """Ask the process groups of these leaders to end, and kill them after `seconds`."""
    for leader in leaders:
        _send(-leader.pid, signal.SIGTERM)
    wait_until(lambda: is_urgent() or not any(map(_lives, leaders)), seconds=seconds)
    for leader in leaders:
        _send(-leader.pid, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    """Send a signal, also to the group of a leader that has ended; pid < 0 means a group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return process.children()
    return []


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
