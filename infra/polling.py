"""Intervals of polls and the timeout of requests, in seconds."""

import time
from collections.abc import Callable

POLL_SECONDS = 0.1  # between two polls of this machine: a process, a lock, an event
ASK_SECONDS = 1.0  # between two polls of the store or of Prefect
SLOW_SECONDS = 5.0  # between two polls of a scheduler, and between two reports of progress
ANSWER_SECONDS = 10.0  # timeout of a request: a server on SQLite may be busy
MARGIN_SECONDS = 5.0  # added to the time in which another process or thread has to end


def wait_until(is_done: Callable[[], bool], *, seconds: float, every: float = POLL_SECONDS) -> bool:
    """Wait until `is_done` returns True, at most `seconds`; return whether it did."""
    deadline = time.monotonic() + seconds
    while not (is_over := is_done()) and time.monotonic() < deadline:
        time.sleep(every)
    return is_over
