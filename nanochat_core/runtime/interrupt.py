"""Stopping a job on purpose: SIGTERM (a scheduler, a spot notice) and SIGINT (Ctrl-C).

By default a signal raises `Interrupted` at once, which suits stages without state. A training loop
wraps itself in `deferred()`: the signal only sets a flag, the loop finishes its step, saves and
raises `Interrupted` itself. The kernel ends a process that does not get there in 20 seconds: a rank
wedged in a collective cannot be asked. Models whose checkpoint takes longer lose what came after
the one before.
"""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 75  # EX_TEMPFAIL: state is saved, start me again
SECONDS_TO_SAVE = 20


class Interrupted(BaseException):
    """The job was asked to stop. State worth keeping is saved before this is raised."""


class Stop:
    """Whether the job was asked to stop."""

    requested = False
    steps_left: int | None = None  # until it stops by itself; None: it does not
    _deferred = False

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler; see the module."""
        self.requested = True
        if not self._deferred:
            raise Interrupted(signal.Signals(signum).name)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS_TO_SAVE)

    def after_step(self) -> None:
        """One step is done. The last one that was asked for ends the job as a signal would."""
        if self.steps_left is not None:
            self.steps_left -= 1
            if self.steps_left == 0:
                self.on_signal(signal.SIGTERM, None)

    @contextlib.contextmanager
    def deferred(self) -> Iterator["Stop"]:
        """Inside, signals set `requested` and nothing else; one that is pending ends it at last."""
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
    """State is saved and the end is near: a second signal must not disturb it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
