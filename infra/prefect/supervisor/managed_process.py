"""A process that the keeper starts, and starts again when it ends, after a growing pause."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from infra.prefect.logs import keep_short, last_line

FIRST_PAUSE = 1.0  # seconds before the second start; doubled with each early end
LONGEST_PAUSE = 30.0
SECONDS_OF_HEALTH = 60.0  # whoever lived so long did not fail at once


class Backoff:
    """How long to wait before something is tried again."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began = 0.0
        self._not_before = 0.0

    @property
    def is_over(self) -> bool:
        """Whether it is time to try."""
        return time.monotonic() >= self._not_before

    def began(self) -> None:
        """A try begins."""
        self._began = time.monotonic()

    def ended(self) -> float:
        """The try ended: how many seconds to wait until the next."""
        now = time.monotonic()
        if now - self._began > SECONDS_OF_HEALTH:
            self._seconds = 0.0
        wait = self._seconds = min(LONGEST_PAUSE, 2 * self._seconds or FIRST_PAUSE)
        self._not_before = now + wait
        return wait


class ManagedProcess:
    """One command, run again and again. Its output goes to a log."""

    def __init__(self, name: str, command: list[str], *, log: Path) -> None:
        self.name = name
        self.pause = Backoff()
        self.since = 0.0  # unix seconds of the last start
        self._command = command
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, until `ended` tells of its end; None when there is none."""
        return self._process.pid if self._process is not None else None

    @property
    def is_over(self) -> bool:
        """Whether there is no live process."""
        return self._process is None or self._process.poll() is not None

    def start(self, environment: dict[str, str]) -> int:
        """Start the command in a session of its own: Ctrl-C at a terminal is the keeper's."""
        keep_short(self.log)
        self.pause.began()
        self.since = time.time()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self.log.parent,  # what lies where the person stands is not meant for us
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self._process.pid

    def ended(self) -> int | None:
        """The exit code of a process that ended, told once; None while it runs."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        self._process = None
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it lives."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once, and what it started in its group."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def last_words(self) -> str:
        """The last line of the log."""
        return last_line(self.log)
