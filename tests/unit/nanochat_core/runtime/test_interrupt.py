"""A stop signal leaves the time to save that the job's grace allows."""

import signal

import pytest

from nanochat_core.runtime.interrupt import Interrupted, Stop


@pytest.mark.parametrize(("grace", "seconds"), [(25.0, 20), (120.0, 115), (6.0, 1)])
def test_the_time_to_save_follows_from_the_grace(grace, seconds):
    stop = Stop()
    stop.allow(grace)
    before = signal.getsignal(signal.SIGALRM)
    left = []

    def save():
        with stop.deferred():
            stop.on_signal(signal.SIGTERM, None)
            left.append(signal.alarm(0))  # what is left of it; no test is ended by it

    with pytest.raises(Interrupted):
        save()
    signal.signal(signal.SIGALRM, before)
    assert left[0] in (seconds - 1, seconds)
