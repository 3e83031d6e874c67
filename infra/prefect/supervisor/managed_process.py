"""A process that the keeper restarts when it ends, with exponential backoff."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from infra.prefect.logs import keep_short, last_line

FIRST_PAUSE = 1.0  # seconds before the second start; doubled with each early end
LONGEST_PAUSE = 30.0
SECONDS_OF_HEALTH = 60.0  # a process that ran longer did not fail at its start


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
        wait = self._seconds = min(LONGEST_PAUSE, 2 * self._seconds or FIRST_PAUSE)
        self._not_before = now + wait
        return wait


class ManagedProcess:
    """One command that is restarted when it ends. Its output goes to a log."""

    def __init__(self, name: str, command: list[str], *, log: Path) -> None:
        self.name = name
        self.pause = Backoff()
        self.since = 0.0  # unix seconds of the last start
        self._command = command
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Return the pid, until `ended` reports the end; None if there is no process."""
        return self._process.pid if self._process is not None else None

    @property
    def is_over(self) -> bool:
        """True if there is no live process."""
        return self._process is None or self._process.poll() is not None

    def start(self, environment: dict[str, str]) -> int:
        """Start the command in a session of its own, so that Ctrl-C reaches the keeper alone."""
        keep_short(self.log)
        self.pause.began()
        self.since = time.time()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self.log.parent,  # not the caller's: its .env would configure Prefect
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self._process.pid

    def ended(self) -> int | None:
        """Return the exit code of a process that ended, once; None while it runs."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        self._process = None  # so that the end is reported once, and `pid` is None from now on
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
        """Return the last line of the log."""
        return last_line(self.log)
