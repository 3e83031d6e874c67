"""Waiting in tests, with an end."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def meanwhile(act: Callable[[], object]) -> Iterator[None]:
    """Run a function in a thread while the block runs, and wait for its end."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    yield
    thread.join()
