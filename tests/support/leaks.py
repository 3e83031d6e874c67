"""No unit test leaves a thread or a socket behind: what it started, it ends.

What the fixtures of a file or of the session started is there before the test and stays.
"""

import os
import socket
import stat
import threading
import time
from collections.abc import Iterator

import pytest

PATIENCE = 60.0  # seconds for what is ending
# Threads of libraries, one a process, that are started by their first use and serve the next test.
OF_LIBRARIES = (
    "AnyIO worker thread",
    "APILogWorkerThread",
    "EventsWorkerThread",
    "asyncio_",
    "pydevd",
    "tqdm_monitor",
)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves what it started."""
    threads, sockets = set(threading.enumerate()), _sockets()
    yield
    deadline = time.monotonic() + PATIENCE
    while (left := _left(threads, sockets)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"left behind: {', '.join(left)}"


def _left(threads: set[threading.Thread], sockets: set[int]) -> list[str]:
    """Describe the threads and sockets that there are beside these."""
    new = (t.name for t in threading.enumerate() if t not in threads)
    left = [f"thread {name}" for name in new if not name.startswith(OF_LIBRARIES)]
    return left + [f"socket {n}" for n in _sockets() - sockets if _is_of_a_network(n)]


def _sockets() -> set[int]:
    """Return the numbers of this process's sockets, of all kinds."""
    found: set[int] = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                found.add(number)
        except OSError:  # that of the listing itself
            continue
    return found


def _is_of_a_network(number: int) -> bool:
    """Return whether a socket is one of networks: libraries keep others to wake their threads."""
    try:
        with socket.socket(fileno=os.dup(number)) as same:
            return same.family in (socket.AF_INET, socket.AF_INET6)
    except OSError:
        return False
