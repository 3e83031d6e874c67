"""Stopping a job on purpose: SIGTERM (a scheduler, a spot notice) and SIGINT (Ctrl-C).

By default a signal raises `Interrupted` at once, which suits stages without state. A training loop
uses `deferred()`: the signal only sets a flag, the loop finishes its step, saves and raises
`Interrupted` itself. SIGALRM ends a process that takes too long for this, as a rank blocked in a
collective runs no Python code: 20 seconds, or what the job's `grace_seconds` leave. A model whose
checkpoint takes longer to save resumes from the checkpoint before.
"""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 75  # EX_TEMPFAIL: state is saved, the job can be started again
_SECONDS_TO_END = 5  # of the grace, for what follows the save: the launcher kills at its end


class Interrupted(BaseException):
    """The job was asked to stop. Raised after its state is saved."""


class Stop:
    """The stop request of this process, if any."""

    requested = False
    steps_left: int | None = None  # until the job stops itself; None means no limit
    seconds_to_save = 20
    _deferred = False

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Handle SIGTERM or SIGINT; see the module."""
        self.requested = True
        if not self._deferred:
            raise Interrupted(signal.Signals(signum).name)
        # The default action, so that the kernel ends a process that no longer runs Python.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(self.seconds_to_save)

    def allow(self, grace_seconds: float) -> None:
        """Set the time to save from the time after which the launcher kills this process."""
        self.seconds_to_save = max(1, int(grace_seconds) - _SECONDS_TO_END)

    def after_step(self) -> None:
        """Count a step. After the last one requested, stop the job as a signal would."""
        if self.steps_left is not None:
            self.steps_left -= 1
            if self.steps_left == 0:
                self.on_signal(signal.SIGTERM, None)

    @contextlib.contextmanager
    def deferred(self) -> Iterator["Stop"]:
        """Inside, signals only set `requested`; if one came, raise `Interrupted` at the end."""
        self._deferred = True
        try:
            yield self
        finally:
            self._deferred = False
            signal.alarm(0)
        if self.requested:
            raise Interrupted


STOP = Stop()


def install() -> None:
    """Route SIGTERM and SIGINT of this process to `STOP`. Main thread only."""
    signal.signal(signal.SIGTERM, STOP.on_signal)
    signal.signal(signal.SIGINT, STOP.on_signal)


def ignore() -> None:
    """Ignore further signals: state is saved, and a second one must not disturb the exit."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
