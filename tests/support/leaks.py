"""No test leaves a thread, a process or a socket behind: what it started, it ends.

What the fixtures of a file or of the session started is there before the test and stays.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

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
    before = _running()
    yield
    deadline = time.monotonic() + PATIENCE
    while (left := _running() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"left behind: {', '.join(_described(*one) for one in sorted(left))}"


def _running() -> set[tuple[str, int]]:
    """Return the threads, child processes and sockets of this process: a kind and a number each."""
    threads = [t for t in threading.enumerate() if not t.name.startswith(OF_LIBRARIES)]
    return {("thread", t.native_id or 0) for t in threads} | set(_children()) | set(_sockets())


def _children() -> Iterator[tuple[str, int]]:
    for listing in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            yield from (("process", int(n)) for n in listing.read_text().split() if _counts(n))


def _counts(process: str) -> bool:
    """Return whether a process runs, and is not the one that Python keeps for shared memory."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
        command = Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return False
    return status.rpartition(") ")[2][0] not in "ZX" and "resource_tracker" not in command


def _sockets() -> Iterator[tuple[str, int]]:
    """Yield the sockets of networks: libraries keep pairs of others to wake their threads."""
    for link in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # that of the listing itself
            if os.readlink(link).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as same:
                    if same.family in (socket.AF_INET, socket.AF_INET6):
                        yield "socket", int(link.name)


def _described(kind: str, number: int) -> str:
    text = ""
    with contextlib.suppress(OSError):
        if kind == "process":
            text = Path(f"/proc/{number}/cmdline").read_text().replace("\0", " ").strip()[:120]
        elif kind == "socket":
            text = os.readlink(f"/proc/self/fd/{number}")
    if kind == "thread":
        text = next((t.name for t in threading.enumerate() if t.native_id == number), "ended")
    return f"{kind} {number} ({text})"
