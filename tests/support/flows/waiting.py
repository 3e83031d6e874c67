"""Waiting in tests, with an end."""

import time
from collections.abc import Callable


def wait_until(is_so: Callable[[], bool], *, seconds: float = 100.0) -> None:
    """Look again and again; fails when it does not become so."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
