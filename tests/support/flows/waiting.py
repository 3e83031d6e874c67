"""Waiting in tests, with an end."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    found: Callable[[], T], *, seconds: float = 100.0, what: str = "", every: float = 0.02
) -> T:
    """Return what `found` returns once it is true. Raises AssertionError if it does not become."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what or found}"
        time.sleep(every)
    return value
